"""The commands ``upcycle``, ``grow`` and ``shrink`` of ``python -m fairseq_tutel.checkpoint``."""

from __future__ import annotations

import argparse
from typing import Any

from ...config.options import FRACTION, Range, at_least, in_range
from ..layout import CheckpointError
from ..store import refuse_target
from .grow import grow
from .shrink import DENSE, shrink, to_dense
from .upcycle import Upcycling, upcycle
from .validation import validation_loss

_POSITIVE, _NATURAL = in_range(int, at_least(1)), in_range(int, at_least(0))
_RAMP = 1000


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the parsers; return them."""
    up = commands.add_parser(
        "upcycle", help="make experts of the FFNs of a dense model of stock fairseq"
    )
    _add_upcycling(up)
    more = commands.add_parser("grow", help="write a set with more experts, copies of its own")
    _add_growing(more)
    fewer = commands.add_parser("shrink", help="write a set with fewer experts, or a dense model")
    _add_shrinking(fewer)
    for parser in (up, more, fewer):
        parser.add_argument(
            "--ranks",
            type=_POSITIVE,
            metavar="W",
            help="ranks of the new set (default: as many as PATH has rank files; upcycle: 1)",
        )
    for parser in (more, fewer):
        parser.add_argument(
            "--load",
            metavar="FILE",
            help="expert_load.jsonl of the run, written with --moe-load-log-interval (default: "
            "the one beside PATH)",
        )
    return [up, more, fewer]


def _add_upcycling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    deviation, fraction = in_range(float, Range(0)), in_range(float, FRACTION)
    add("--num-experts", type=_POSITIVE, required=True, metavar="E", help="experts per MoE layer")
    add("--moe-freq", type=_NATURAL, metavar="F", help="every F-th layer becomes sparse (default: "
        "2; 0 if a flag for one side is given)")  # fmt: skip
    for side in ("encoder", "decoder"):
        help_ = f"the same for the {side} only (default: 0, none)"
        add(f"--{side}-moe-freq", type=_NATURAL, default=0, metavar="F", help=help_)
    add("--top-k", type=_POSITIVE, default=2, metavar="K", help="experts per token (default: 2)")
    add("--granularity", type=_POSITIVE, default=1, metavar="G", help="cut each FFN into experts "
        "of 1/G of its width; G must divide K (default: 1)")  # fmt: skip
    add("--shared-expert", action="store_true", help="keep the FFN as a shared expert; the other "
        "experts add nothing at first")  # fmt: skip
    add("--drop-ratio", type=fraction, default=0.0, metavar="R", help="share of each expert's "
        "hidden units that is drawn anew (default: 0)")  # fmt: skip
    add("--router-std", type=deviation, default=0.02, metavar="X", help="standard deviation of the "
        "router's weights (default: 0.02)")  # fmt: skip
    add("--seed", type=int, default=1, help="seed of all draws (default: 1)")
    add("--allow-inexact", action="store_true", help="allow a model that does not start as the "
        "dense one: --top-k 1, a G that does not divide K, or --drop-ratio")  # fmt: skip


def _add_growing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-experts", type=_POSITIVE, required=True, metavar="E2", help="experts of the new set")
    add("--by", choices=("uniform", "load"), default="uniform", help="copy each expert equally "
        "often, or the most loaded first (default: uniform)")  # fmt: skip
    add("--exact", action="store_true", help="keep the function: the load bias holds the new "
        "experts back at first, and lets them in while training")  # fmt: skip
    add("--moe-growth-updates", type=_POSITIVE, default=_RAMP, metavar="N", help="with --exact: "
        f"updates over which they come in (default: {_RAMP})")  # fmt: skip
    add("--noise", type=in_range(float, at_least(0)), default=0.01, metavar="X", help="standard "
        "deviation of the noise on the router rows of copies, relative to that of all rows "
        "(default: 0.01)")  # fmt: skip
    add("--seed", type=int, default=1, help="seed of the noise (default: 1)")


def _add_shrinking(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--num-experts", type=_POSITIVE, metavar="E2", help="experts of the new "
                        "set, the most loaded ones of each layer")  # fmt: skip
    target.add_argument("--dense", nargs="?", choices=DENSE, const="mean", help="write a dense "
                        "model for stock fairseq, made of one expert, the most loaded; of the mean "
                        "of all, weighted by load (the default); or of the shared expert",
                        )  # fmt: skip
    parser.add_argument("--data", metavar="DATA", help="data-bin: print the validation loss before "
                        "and after")  # fmt: skip
    parser.add_argument("--gen-subset", default="valid", help="subset of DATA (default: valid)")


def run_growth(args: argparse.Namespace) -> list[str]:
    """Run one of the commands; return the lines to print."""
    common = {"ranks": args.ranks, "force": args.force}
    if args.command == "upcycle":
        return [upcycle(args.path, args.out, _upcycling(args), **common)]
    if args.command == "grow":
        ramp = args.moe_growth_updates if args.exact else 0
        how = {"by": args.by, "load": args.load, "noise": args.noise, "seed": args.seed}
        return [grow(args.path, args.out, args.num_experts, ramp=ramp, **how, **common)]
    if args.dense and args.ranks:
        raise CheckpointError(f"--ranks {args.ranks}: a dense model is one file")
    before = None
    if args.data:
        refuse_target(args.out, args.path, args.force)  # now, not after minutes of evaluation
        before = validation_loss(args.path, args.data, args.gen_subset)
    if args.dense:
        written = to_dense(args.path, args.out, args.dense, load=args.load, force=args.force)
    else:
        written = shrink(args.path, args.out, args.num_experts, load=args.load, **common)
    if before is None:
        return [written]
    after = validation_loss(written, args.data, args.gen_subset)
    return [written, f"{args.gen_subset} loss (base 2): {before:g} before, {after:g} after"]


def _upcycling(args: argparse.Namespace) -> Upcycling:
    freq = args.moe_freq
    if freq is None:  # as --arch transformer_moe reads it
        freq = 0 if args.encoder_moe_freq or args.decoder_moe_freq else 2
    return Upcycling(
        num_experts=args.num_experts,
        freq=freq,
        encoder_freq=args.encoder_moe_freq,
        decoder_freq=args.decoder_moe_freq,
        top_k=args.top_k,
        granularity=args.granularity,
        shared=args.shared_expert,
        drop_ratio=args.drop_ratio,
        router_std=args.router_std,
        seed=args.seed,
        inexact=args.allow_inexact,
    )
