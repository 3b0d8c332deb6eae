"""Command line of the checkpoint tools: inspect, merge, average, reshard, import, growth, ..."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from ..command_line import EXIT_USAGE, CommandLine, columns, run_and_exit
from ..config.options import at_least, in_range
from .average import average
from .folders import import_folder
from .growth.commands import add_commands
from .inspection import inspect
from .layout import CheckpointError
from .lora import merge_lora
from .store import merge, reshard

_INCONSISTENT = 1
_PATH_HELP = "NAME.pt, which names a set (also NAME-shared.pt, NAME-rank-N.pt) or one file"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``python -m fairseq_tutel.checkpoint``; ``run`` writes a set."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.checkpoint",
        description="Inspect, merge, reshard and import checkpoints with experts, and change the "
        "number of experts. PATH is only read. Exit codes: 0 done, 1 the inspected set is "
        "inconsistent, 2 an error, printed in one line.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("inspect", help="show the content of a checkpoint and its defects")
    show.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    show.add_argument("--verify", action="store_true", help="read every byte, check all checksums")
    join = commands.add_parser("merge", help="write one file that holds all experts, for sharing")
    join.set_defaults(
        run=lambda a: merge(a.path, a.out, with_optimizer=a.with_optimizer, force=a.force)
    )
    join.add_argument("--with-optimizer", action="store_true", help="keep the optimizer state "
                      "(default: leave it out, for a smaller file)")  # fmt: skip
    place = commands.add_parser("reshard", help="write a set for another number of ranks")
    place.set_defaults(run=lambda a: reshard(a.path, a.out, a.ranks, force=a.force))
    place.add_argument("--ranks", type=in_range(int, at_least(1)), required=True, metavar="N",
                       help="number of ranks W; it must divide the number of experts E, or E must "
                       "divide it")  # fmt: skip
    lora = commands.add_parser(
        "merge-lora", help="write a set whose weights contain the updates of --moe-lora-rank"
    )
    lora.set_defaults(run=lambda a: merge_lora(a.path, a.out, force=a.force))
    mean = commands.add_parser("average", help="write the mean of several checkpoints of a run")
    mean.set_defaults(run=lambda a: average(a.paths, a.out, force=a.force))
    mean.add_argument("paths", metavar="PATH", nargs="+", help=_PATH_HELP)
    growth = add_commands(commands, _PATH_HELP)
    bring = commands.add_parser(
        "import", help="write a set from a folder of transformers (NllbMoe, or an export)"
    )
    bring.set_defaults(run=lambda a: import_folder(a.path, a.out, ranks=a.ranks, force=a.force))
    bring.add_argument("--ranks", type=in_range(int, at_least(1)), metavar="W",
                       help="ranks of the new set (default: 1)")  # fmt: skip
    bring.add_argument("path", metavar="FOLDER", help="with config.json and safetensors")
    for command in (show, join, place, lora):
        command.add_argument("path", metavar="PATH", help=_PATH_HELP)
    for command in (join, place, lora, mean, bring, *growth):
        command.add_argument(
            "out", metavar="OUT", help="the new NAME.pt; its folder is made if missing"
        )
        command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "inspect":
            report = inspect(args.path, verify=args.verify)
            print(json.dumps(report, indent=2) if args.json else format_report(report))
            return 0 if report["consistent"] else _INCONSISTENT
        logging.basicConfig(level=logging.INFO, format="%(message)s")  # progress, on stderr
        print(args.run(args))
        return 0
    except BrokenPipeError:  # not an error of a checkpoint
        raise
    except (CheckpointError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def format_report(report: dict[str, Any]) -> str:
    """Return the table that ``inspect`` prints."""
    known = {key: "unknown" if value is None else value for key, value in report.items()}
    rows = [
        ("checkpoint", report["path"]),
        ("kind", _kind_text(report)),
        ("written by", known["written_by"]),
        ("save id", known["save_id"]),
        ("updates done", str(known["num_updates"])),
        ("goes on in epoch", str(known["epoch"])),
        ("experts", str(known["num_experts"])),
        *(("growth", entry) for entry in report["growth"]),
        ("MoE layers", _layers_text(report["moe_layers"])),
        ("parameters", f"{report['params_total']:,}"),
        ("  dense", f"{report['params_dense']:,}"),
        ("  expert", f"{report['params_expert']:,}"),
        ("dtypes", ", ".join(f"{name} {n:,}" for name, n in report["dtypes"].items()) or "none"),
        ("optimizer state", report["optimizer_state"]),
        ("size on disk", f"{_mib(report['size_on_disk'])} in {len(report['files'])} files"),
        ("consistent", "yes" if report["consistent"] else "NO"),
    ]
    table = [("file", "size", "experts", "parameters", "save id")]
    for file in report["files"]:
        counts = str(file["experts"]), f"{file['params']:,}"
        table.append((file["name"], _mib(file["size"]), *counts, file["save_id"] or "-"))
    lines = [*columns(rows), "", *columns(table, right=(1, 2, 3))]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _kind_text(report: dict[str, Any]) -> str:
    if report["num_rank_files"] is None:
        merged = "one file without experts" if report["num_experts"] == 0 else "one merged file"
        return merged if report["kind"] == "merged" else "set"
    saved = f", saved by {report['world_size']} ranks" if report["world_size"] else ""
    again = f" and {report['replicas']} that repeat them" if report["replicas"] else ""
    return f"set of {report['num_rank_files']} rank files{again}{saved}"


def _layers_text(layers: list[str]) -> str:
    shown = layers if len(layers) <= 4 else [*layers[:3], "...", layers[-1]]
    return f"{len(layers)}" + (f" ({', '.join(shown)})" if layers else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    run_and_exit(main)
