"""Command line of the checkpoint tools: inspect, merge, reshard."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..command_line import CommandLine, columns
from ..ranges import at_least, in_range
from .errors import CheckpointError
from .inspection import inspect
from .reshard import merge, reshard

_INCONSISTENT = 1
_ERROR = 2
_PATH_HELP = "NAME.pt of a set (NAME-shared.pt, NAME-rank-N.pt; either may be given) or one file"


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m fairseq_tutel.checkpoint``."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.checkpoint",
        description="Look into, merge and reshard expert-sharded checkpoints. "
        "The source is only ever read. Exit codes: 0 done, 1 the inspected set is inconsistent, "
        "2 an error, printed in one line.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    show = commands.add_parser("inspect", help="show what is in a checkpoint and if it is complete")
    show.add_argument("path", metavar="PATH", help=_PATH_HELP)
    show.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    show.add_argument("--verify", action="store_true", help="read every byte, check all checksums")

    join = commands.add_parser("merge", help="write one file that holds all experts, for sharing")
    _add_rewrite_arguments(join, "OUT", "the new file, NAME.pt; its folder is made if missing")
    join.add_argument(
        "--with-optimizer",
        action="store_true",
        help="keep the optimizer state (default: leave it out, for a smaller file)",
    )

    place = commands.add_parser("reshard", help="write a set for another number of ranks")
    _add_rewrite_arguments(
        place, "OUT", "name of the new set, NAME.pt; its folder is made if missing"
    )
    place.add_argument(
        "--ranks",
        type=in_range(int, at_least(1)),
        required=True,
        metavar="N",
        help="number of ranks W; it must divide the number of experts E, or E must divide it",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return _COMMANDS[args.command](args)
    except (CheckpointError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _ERROR


def _add_rewrite_arguments(parser: argparse.ArgumentParser, out: str, out_help: str) -> None:
    parser.add_argument("path", metavar="PATH", help=_PATH_HELP)
    parser.add_argument("out", metavar=out, help=out_help)
    parser.add_argument("--force", action="store_true", help=f"replace {out} if it exists")


def _run_inspect(args: argparse.Namespace) -> int:
    report = inspect(args.path, verify=args.verify)
    print(json.dumps(report, indent=2) if args.json else format_report(report))
    return 0 if report["consistent"] else _INCONSISTENT


def _run_merge(args: argparse.Namespace) -> int:
    written = merge(
        args.path,
        args.out,
        with_optimizer=args.with_optimizer,
        force=args.force,
        progress=_show_progress,
    )
    print(written)
    return 0


def _run_reshard(args: argparse.Namespace) -> int:
    print(reshard(args.path, args.out, args.ranks, force=args.force, progress=_show_progress))
    return 0


_COMMANDS = {"inspect": _run_inspect, "merge": _run_merge, "reshard": _run_reshard}


def _show_progress(done: int, total: int, name: str) -> None:
    step = f"[{done + 1}/{total}] writing {name}" if done < total else f"complete: {name}"
    print(step, file=sys.stderr, flush=True)


def format_report(report: dict[str, Any]) -> str:
    """The table that ``inspect`` prints."""
    rows = [
        ("checkpoint", report["path"]),
        ("kind", _kind_text(report)),
        ("written by", _or_unknown(report["written_by"])),
        ("save id", _or_unknown(report["save_id"])),
        ("update, epoch", f"{_or_unknown(report['num_updates'])}, {_or_unknown(report['epoch'])}"),
        ("experts", _or_unknown(report["num_experts"])),
        ("MoE layers", _layers_text(report["moe_layers"])),
        ("parameters", f"{report['params_total']:,}"),
        ("  dense", f"{report['params_dense']:,}"),
        ("  expert", f"{report['params_expert']:,}"),
        ("dtypes", ", ".join(f"{name} {n:,}" for name, n in report["dtypes"].items()) or "none"),
        ("optimizer state", report["optimizer_state"]),
        ("size on disk", f"{_bytes_text(report['size_on_disk'])} in {len(report['files'])} files"),
        ("consistent", "yes" if report["consistent"] else "NO"),
    ]
    if report["unfinished_save"]:
        rows.append(("note", "a save was interrupted after its commit; readable as it is"))
    if report["temporary_files"] and not report["unfinished_save"]:
        rows.append(("note", f"{len(report['temporary_files'])} temporary files of another save"))
    lines = [*columns(rows), "", *_file_table(report["files"])]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _kind_text(report: dict[str, Any]) -> str:
    if report["num_rank_files"] is None:
        return "one merged file" if report["kind"] == "merged" else "set"
    saved = f", saved by {report['world_size']} ranks" if report["world_size"] else ""
    return f"set of {report['num_rank_files']} rank files{saved}"


def _layers_text(layers: list[str]) -> str:
    shown = layers if len(layers) <= 4 else [*layers[:3], "...", layers[-1]]
    return f"{len(layers)}" + (f" ({', '.join(shown)})" if layers else "")


def _file_table(files: list[dict[str, Any]]) -> list[str]:
    table = [("file", "size", "experts", "parameters", "save id")]
    for file in files:
        size, params = _bytes_text(file["size"]), f"{file['params']:,}"
        table.append((file["name"], size, str(file["experts"]), params, file["save_id"] or "-"))
    return columns(table, right=(1, 2, 3))


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


if __name__ == "__main__":
    sys.exit(main())
