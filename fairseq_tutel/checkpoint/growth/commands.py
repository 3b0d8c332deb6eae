"""The commands ``upcycle``, ``grow`` and ``shrink`` of ``python -m fairseq_tutel.checkpoint``."""

import argparse
import dataclasses
from typing import Any

from ...config.options import FINITE, at_least, in_range
from ..layout import CheckpointError
from .dense import DENSE, to_dense
from .grow import grow, shrink
from .upcycle import Upcycling, upcycle

_POSITIVE = in_range(int, at_least(1))
# fields of Upcycling that have another name on the command line
_FLAGS = {
    "freq": "moe-freq",
    "encoder_freq": "encoder-moe-freq",
    "decoder_freq": "decoder-moe-freq",
    "shared": "shared-expert",
    "inexact": "allow-inexact",
    "from_first": "dense-from-first",
}


def add_commands(commands: Any, path_help: str) -> list[argparse.ArgumentParser]:
    """Add the parsers, with PATH and what only growth needs; return them."""
    up = commands.add_parser("upcycle", help="make experts of the FFNs of dense models of fairseq")
    _add_upcycling(up)
    up.add_argument("path", metavar="PATH", nargs="+", help=f"{path_help}; several dense models "
                    "give experts in turn, and the average of all else")  # fmt: skip
    more = commands.add_parser("grow", help="write a set with more experts, copies of its own")
    _add_growing(more)
    fewer = commands.add_parser("shrink", help="write a set with fewer experts, or a dense model")
    _add_shrinking(fewer)
    text = "ranks of the new set (default: {})"
    for parser, default in ((up, "1"), *((each, "as PATH has") for each in (more, fewer))):
        parser.add_argument("--ranks", type=_POSITIVE, metavar="W", help=text.format(default))
    text = "log written with --moe-load-log-interval (default: the expert_load.jsonl beside PATH)"
    for parser in (more, fewer):
        parser.add_argument("path", metavar="PATH", help=path_help)
        parser.add_argument("--load", metavar="FILE", help=text)
    for parser in (up, more, fewer):
        parser.set_defaults(run=_run)
    return [up, more, fewer]


def _add_upcycling(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(Upcycling):
        text, default = field.metadata["help"], field.default
        how: dict[str, Any] = {"action": "store_true"}
        if default is not False:
            kind = float if isinstance(default, float) else int
            how = {"type": in_range(kind, field.metadata["range"] or FINITE)}
            how |= {"metavar": "X" if kind is float else "N", "default": default}
            how |= {"required": field.name == "num_experts"}
            text += f" (default: {default})" if default else ""
        flag = _FLAGS.get(field.name, field.name.replace("_", "-"))
        parser.add_argument(f"--{flag}", dest=field.name, help=text, **how)


def _add_growing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-experts", type=_POSITIVE, required=True, metavar="E2", help="experts of the new set")
    add("--by", choices=("uniform", "load"), default="uniform", help="copy each expert equally "
        "often, or the most loaded first (default: uniform)")  # fmt: skip
    add("--noise", type=in_range(float, at_least(0)), default=0.01, metavar="X", help="standard "
        "deviation of the noise on the router rows of copies, relative to that of all rows "
        "(default: 0.01)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="seed of the noise (default: 1)")


def _add_shrinking(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--num-experts", type=_POSITIVE, metavar="E2", help="experts of the new "
                        "set, the most loaded ones of each layer")  # fmt: skip
    target.add_argument("--dense", nargs="?", choices=DENSE, const="mean", help="write a dense "
                        "model for stock fairseq; one: of the most loaded expert, mean: of the "
                        "mean weighted by load, shared: of the shared expert (default: mean)",
                        )  # fmt: skip


def _run(args: argparse.Namespace) -> str:
    common = {"ranks": args.ranks, "force": args.force}
    if args.command == "upcycle":
        how = {field.name: getattr(args, field.name) for field in dataclasses.fields(Upcycling)}
        return upcycle(args.path, args.out, Upcycling(**how), **common)
    common["load"] = args.load
    if args.command == "grow":
        how = {"by": args.by, "noise": args.noise, "seed": args.seed}
        return grow(args.path, args.out, args.num_experts, **how, **common)
    if args.dense and args.ranks:
        raise CheckpointError(f"--ranks {args.ranks}: a dense model is one file")
    if args.dense:
        return to_dense(args.path, args.out, args.dense, load=args.load, force=args.force)
    return shrink(args.path, args.out, args.num_experts, **common)
