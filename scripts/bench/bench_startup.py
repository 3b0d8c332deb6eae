"""Seconds until the first update, with experts and without, and those of the import.

    python scripts/bench/bench_startup.py

Two pairs of commands take turns, each in a process of its own: fairseq-train of a small language
model until its log has the first update, with experts and stock's dense one; and the imports of
fairseq_tutel.moe and of torch alone.

Good: at most 1.5 s later with experts, and 0.3 s for the import.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Case, Point, call, median_interval, sweep
from program import Ranks, Report, goal, program
from record import ROOT

_TRAIN = """fairseq-train {data} --task language_modeling --tokens-per-sample 64 --batch-size 4
    --required-batch-size-multiple 1 --decoder-layers 4 --decoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --optimizer adam --lr 0.001 --max-update 1
    --log-format simple --log-interval 1 --cpu --no-save --disable-validation {model}"""
_EXPERTS = """--user-dir {package} --arch transformer_lm_gpt_moe --criterion moe_cross_entropy
    --moe-expert-count 8"""
_UNTIL = "num_updates=1,"
_GOALS = {"fairseq-train": 1.5, "import": 0.3}  # seconds more with experts
OPTIONS = {"repetitions": (11, "of each command, after one that does not count")}


def commands(data: Path) -> dict[str, tuple[str, str]]:
    """Return the commands with experts and without."""
    experts = _EXPERTS.format(package=shlex.quote(str(ROOT / "fairseq_tutel")))
    models, modules = (experts, "--arch transformer_lm_gpt"), ("fairseq_tutel.moe", "torch")
    return {
        "fairseq-train": tuple(_TRAIN.format(data=data, model=model) for model in models),
        "import": tuple(f"{shlex.quote(sys.executable)} -c 'import {name}'" for name in modules),
    }


def run_until(command: str, line: str | None) -> None:
    """Run a command until its output has a line; None: to its end.

    Raises:
        ValueError: it fails, or ends without the line.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    lines: list[str] = []
    with subprocess.Popen(shlex.split(command), **how) as process:
        for text in process.stdout:
            lines.append(text)
            if line is not None and line in text:
                process.kill()
                return
    if process.returncode or line is not None:
        raise ValueError(f"{' '.join(command.split())} failed:\n{''.join(lines[-15:])}")


def points(folder: Path) -> Iterator[Point]:
    """The pairs of commands, on a data-bin of a few words."""
    text = folder / "text"
    text.write_text("in the beginning was the word\n" * 200, encoding="utf-8")
    command = f"fairseq-preprocess --only-source --trainpref {text} --destdir {folder / 'data'}"
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    for name, pair in commands(folder / "data").items():
        until = _UNTIL if name == "fairseq-train" else None
        runs = [
            call(lambda command=command, until=until: run_until(command, until)) for command in pair
        ]
        cases = [Case(kind, run) for kind, run in zip(("with", "without"), runs, strict=True)]
        yield Point(name, cases, derive=difference)


def difference(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Seconds more with experts: the median of the turns with its interval."""
    pairs = zip(*(found["raw_ms"][name]["forward"] for name in ("with", "without")), strict=True)
    return {"with": {"s more": median_interval([1e-3 * (a - b) for a, b in pairs])}}


def goals_of(results: dict[str, Any]) -> list[dict]:
    """Goals of the medians."""
    return [
        goal(
            f"{name}: at most {bound} s more",
            results[name]["derived"]["with"]["s more"][1],
            bound,
            True,
        )
        for name, bound in _GOALS.items()
        if name in results
    ]


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_one()
    repetitions = 1 if options.tiny else options.repetitions
    with (
        tempfile.TemporaryDirectory() as folder,
        Report("startup", ranks, options.output, "startup") as report,
    ):
        sweep(report, points(Path(folder)), ranks, repetitions, warmup=1, goals=goals_of)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
