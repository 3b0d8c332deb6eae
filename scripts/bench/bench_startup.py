"""Seconds until the first update, with experts and without, and those of the import.

    python scripts/bench/bench_startup.py

Two pairs of commands, which take turns, each in a process of its own: fairseq-train of a small
language model, with experts and stock's dense one, until its log has the first update; and the
imports of fairseq_tutel.moe and of torch alone, until the process has ended. A difference is the
median over turns of what the first takes longer than the second, with its interval.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runner
from measure import median_interval
from ranks import Ranks
from record import ROOT, device_name, say, table
from runner import Report, add_defaults, command_line

_TRAIN = """fairseq-train {data} --task language_modeling --tokens-per-sample 64 --batch-size 4
    --required-batch-size-multiple 1 --decoder-layers 4 --decoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --optimizer adam --lr 0.001 --max-update 1
    --log-format simple --log-interval 1 --cpu --no-save --disable-validation {model}"""
_EXPERTS = """--user-dir {package} --arch transformer_lm_gpt_moe --criterion moe_cross_entropy
    --moe-expert-count 8"""
_IMPORT = "{python} -c 'import {module}'"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add_defaults(parser, {"repetitions": (11, "of each command, after one that is not counted")})
    output = "JSON file (default: runs/bench/startup.json)"
    parser.add_argument("--output", type=Path, default=Path("runs/bench/startup.json"), help=output)
    return parser.parse_args(argv)


def make_data(folder: Path) -> Path:
    """A data-bin of a few words."""
    text = folder / "text"
    text.write_text("in the beginning was the word\n" * 200, encoding="utf-8")
    command = f"fairseq-preprocess --only-source --trainpref {text} --destdir {folder / 'data'}"
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return folder / "data"


@dataclass(frozen=True)
class Pair:
    """Two commands, the line of a log that ends the clock, the goal of the difference in s."""

    with_experts: str
    without: str
    until: str | None
    goal: float


def pairs(data: Path) -> dict[str, Pair]:
    """What is compared."""
    experts = _EXPERTS.format(package=shlex.quote(str(ROOT / "fairseq_tutel")))
    python = shlex.quote(sys.executable)
    return {
        "fairseq-train until the first update": Pair(
            _TRAIN.format(data=data, model=experts),
            _TRAIN.format(data=data, model="--arch transformer_lm_gpt"),
            until="num_updates=1,",
            goal=1.5,
        ),
        "import": Pair(
            _IMPORT.format(python=python, module="fairseq_tutel.moe"),
            _IMPORT.format(python=python, module="torch"),
            until=None,
            goal=0.3,
        ),
    }


def seconds_of(command: str, until: str | None = None) -> float:
    """From the start of a command to a line with ``until``; None: to its end."""
    begin, found, lines = time.perf_counter(), None, []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(shlex.split(command), cwd=ROOT, **pipes) as process:
        for line in process.stdout:
            lines.append(line)
            if found is None and until is not None and until in line:
                found = time.perf_counter() - begin
    if until is None:
        found = time.perf_counter() - begin
    if process.returncode or found is None:
        raise ValueError(f"{' '.join(command.split())} failed:\n{''.join(lines[-15:])}")
    return found


def show(result: dict[str, Any]) -> None:
    """A row of each pair."""
    say(f"start-up on {device_name(result)}, {result['repetitions']} turns")
    rows = [{"name": name, **found} for name, found in result["results"].items()]
    say(table(rows, {
        "seconds": "{name}",
        "with experts": "{with_experts:.2f}",
        "without": "{without:.2f}",
        "difference": "{difference[1]:.2f} ({difference[0]:.2f} to {difference[2]:.2f})",
    }))  # fmt: skip
    for row in rows:
        verdict = "reached" if row["difference"][1] <= row["goal"] else "NOT reached"
        say(f"goal: {row['name']}: at most {row['goal']} s more: {verdict}")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    if ranks.world_size > 1 or options.repetitions < 1:
        raise ValueError("one process, which starts others, and at least one repetition")
    settings = {"repetitions": options.repetitions}
    report, results = Report("startup", ranks, options.output, **settings), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, pair in pairs(make_data(Path(folder))).items():
            commands: tuple[str, str] = pair.with_experts, pair.without
            raw: list[list[float]] = [[], []]
            for turn in range(options.repetitions + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    raw[which].append(seconds_of(commands[which], pair.until))
            longer, shorter = (values[1:] for values in raw)
            results[name] = {
                "with_experts": median_interval(longer)[1],
                "without": median_interval(shorter)[1],
                "difference": median_interval(
                    [a - b for a, b in zip(longer, shorter, strict=True)]
                ),
                "goal": pair.goal,
                "raw_seconds": {"with_experts": longer, "without": shorter},
            }
    report.finish({"results": results}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
