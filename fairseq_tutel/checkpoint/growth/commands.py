"""The commands ``upcycle``, ``grow`` and ``shrink`` of ``python -m fairseq_tutel.checkpoint``."""

from __future__ import annotations

import argparse
from typing import Any

from ...config import EXPERT_GRAD_NORMALIZATIONS
from ...config.options import FRACTION, Range, at_least, in_range
from ..layout import CheckpointError
from ..store import refuse_target
from .grow import grow
from .shrink import DENSE, HOW, shrink, to_dense
from .upcycle import Upcycling, upcycle
from .validation import validation_loss

_POSITIVE = in_range(int, at_least(1))
_RAMP = 1000


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the parsers; returns those that read a checkpoint and write another."""
    up = commands.add_parser(
        "upcycle", help="make experts of the FFNs of a dense model of stock fairseq"
    )
    _add_upcycling(up)
    more = commands.add_parser("grow", help="write a set with more experts, copies of its own")
    more.add_argument(
        "--num-experts", type=_POSITIVE, required=True, metavar="E2", help="of the new set"
    )
    _add_load(more, "uniform", ("uniform", "load"), "what is copied first")
    more.add_argument(
        "--exact",
        action="store_true",
        help="the function stays what it is: new experts are held back by the load bias, and come "
        "in while training",
    )
    more.add_argument(
        "--moe-growth-updates",
        type=_POSITIVE,
        default=_RAMP,
        metavar="N",
        help=f"with --exact: updates over which they come in (default: {_RAMP})",
    )
    more.add_argument(
        "--noise",
        type=in_range(float, at_least(0)),
        default=0.01,
        metavar="X",
        help="deviation of what is added to the router rows of copies, times that of the rows "
        "(default: 0.01)",
    )
    more.add_argument("--seed", type=int, default=1, help="of the noise (default: 1)")
    fewer = commands.add_parser("shrink", help="write a set with fewer experts, or a dense model")
    target = fewer.add_mutually_exclusive_group(required=True)
    target.add_argument("--num-experts", type=_POSITIVE, metavar="E2", help="of the new set")
    target.add_argument(
        "--dense",
        nargs="?",
        choices=DENSE,
        const="mean",
        help="write a dense model of stock fairseq: of one expert, the most loaded; of the mean of "
        "all, weighted by load (the default); of the shared expert",
    )
    _add_load(fewer, "drop", HOW, "drop the least loaded, or merge pairs with similar router rows")
    fewer.add_argument(
        "--data", metavar="DATA", help="data-bin: print the validation loss before and after"
    )
    fewer.add_argument("--gen-subset", default="valid", help="of it (default: valid)")
    for parser in (up, more, fewer):
        parser.add_argument(
            "--ranks",
            type=_POSITIVE,
            metavar="W",
            help="ranks of the new set (default: as many as the set's files; upcycle: 1)",
        )
    return [up, more, fewer]


def _add_load(parser: argparse.ArgumentParser, default: str, choices: Any, what: str) -> None:
    parser.add_argument("--by", choices=choices, default=default, help=f"{what} ({default})")
    parser.add_argument(
        "--load",
        metavar="FILE",
        help="the run's expert_load.jsonl (default: that beside PATH), of --moe-load-log-interval",
    )


def _add_upcycling(parser: argparse.ArgumentParser) -> None:
    add, natural = parser.add_argument, in_range(int, at_least(0))
    add("--num-experts", type=_POSITIVE, required=True, metavar="E", help="of each sparse layer")
    add(
        "--moe-freq", type=natural, metavar="F", help="every F-th layer becomes sparse (default: 2)"
    )
    add("--encoder-moe-freq", type=natural, default=0, metavar="F", help="of the encoder alone")
    add("--decoder-moe-freq", type=natural, default=0, metavar="F", help="of the decoder alone")
    add("--top-k", type=_POSITIVE, default=2, metavar="K", help="experts of a token (default: 2)")
    add(
        "--granularity",
        type=_POSITIVE,
        default=1,
        metavar="G",
        help="experts of 1/G of the width; G must divide K (default: 1)",
    )
    add(
        "--shared-expert",
        action="store_true",
        help="keep the FFN as a shared expert, beside experts that add nothing at first",
    )
    add(
        "--drop-ratio",
        type=in_range(float, FRACTION),
        default=0.0,
        metavar="R",
        help="share of each expert's hidden units that is drawn anew (default: 0)",
    )
    add(
        "--optimizer",
        choices=("drop", "copy"),
        default="drop",
        help="its state: left out, so that the schedule begins anew, or Adam's, scaled for experts",
    )
    add(
        "--moe-normalize-expert-grad",
        choices=EXPERT_GRAD_NORMALIZATIONS,
        default="world_size",
        help="of the run to come, on --ranks, for --optimizer copy",
    )
    add("--router-std", type=in_range(float, Range(0)), default=0.02, metavar="X",
        help="deviation of the router's weights (default: 0.02)")  # fmt: skip
    add("--seed", type=int, default=1, help="of what is drawn (default: 1)")
    add(
        "--allow-inexact",
        action="store_true",
        help="also start as another function: with --top-k 1, a G that does not divide K, or "
        "--drop-ratio",
    )


def run_growth(args: argparse.Namespace) -> list[str]:
    """Run one of the commands; the lines to print."""
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
        how = {"how": args.by, "load": args.load}
        written = shrink(args.path, args.out, args.num_experts, **how, **common)
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
        copy_optimizer=args.optimizer == "copy",
        expert_grad=args.moe_normalize_expert_grad,
        inexact=args.allow_inexact,
    )
