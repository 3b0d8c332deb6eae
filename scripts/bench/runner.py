"""What every benchmark does: common options, ranks, result, exit code."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks, choose_device, connected
from record import describe_run, quiet_logs, say, write_json


def words(kind: Callable[[str], Any] = str) -> dict[str, Any]:
    """Arguments of an option that takes a list: ``add("--sizes", **words(int))``."""
    return {"type": lambda text: [kind(word) for word in text.split(",")], "metavar": "LIST"}


def command_line(doc: str, presets: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have.

    Args:
        doc: docstring of the benchmark, whose first paragraph is its description.
        presets: name -> something with an ``about``; None: the benchmark has none.
    """
    about = [f"  {name:15s} {preset.about}" for name, preset in (presets or {}).items()]
    parser = argparse.ArgumentParser(
        description=doc.split("\n\n")[0],
        epilog="\n".join(["presets:", *about]) if about else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    if presets:
        add = parser.add_argument
        add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
        add("--tiny", action="store_true", help="rehearsal: sizes and repetitions cut down")
        add("--seed", type=int, default=1, help="of weights and inputs (default: 1)")
    return parser


def expect_known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for names that an option does not know."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option} {','.join(unknown)}: choose from {', '.join(known)}")


def add_defaults(parser: argparse.ArgumentParser, defaults: Mapping[str, tuple[Any, str]]) -> None:
    """Options of the default's type, from name -> (default, help)."""
    for name, (default, text) in defaults.items():
        about = f"{text} (default: {default})".lstrip()
        parser.add_argument(f"--{name}", type=type(default), default=default, help=about)


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option ``--processor-time``, which :func:`check_clock` checks."""
    text = "of one thread, on a busy machine: processor time in place of the wall clock's"
    parser.add_argument("--processor-time", action="store_true", help=text)


def check_clock(options: argparse.Namespace, ranks: Ranks) -> None:
    """Raise ValueError where ``--processor-time`` would say nothing of the time that passes."""
    threads = torch.get_num_threads()
    if options.processor_time and (threads, ranks.world_size, ranks.device.type) != (1, 1, "cpu"):
        raise ValueError(
            f"--processor-time: for one thread of one rank on a CPU, not {threads} of each of "
            f"{ranks.world_size} on {ranks.device.type}"
        )


class Report:
    """A result from the start of the measurement to its file.

    Args:
        benchmark: its name.
        ranks: of the job; the first one writes.
        path: of the JSON file.
        about: what is known before it is measured.
    """

    seconds_between = 5.0  # two writes of a result that is not complete

    def __init__(self, benchmark: str, ranks: Ranks, path: Path, **about):
        self.ranks, self.path = ranks, path
        self._about = {**describe_run(benchmark, ranks.device, ranks.world_size), **about}
        self._written = -math.inf

    def keep(self, measured: Callable[[], dict[str, Any]]) -> None:
        """Write what is measured so far if it is time to: who stops a run loses seconds only."""
        now = time.monotonic()
        if self.ranks.first and now - self._written >= self.seconds_between:
            write_json({**self._about, **measured(), "complete": False}, self.path)
            self._written = now

    def finish(self, measured: dict[str, Any], show: Callable[[dict], None]) -> dict[str, Any]:
        """Print and write the result; all ranks call."""
        result = {**self._about, **measured}
        if not self.ranks.first:
            return result
        show(result)
        for name, reason in result.get("not_run", {}).items():
            say(f"{name}: not run: {reason}")
        for goal in result.get("goals", ()):
            verdict = "reached" if goal["reached"] else "NOT reached"
            say(f"goal: {goal['goal']}: {goal['ratio']:.2f}, {verdict}")
        write_json(result, self.path)
        say(f"written: {self.path}")
        return result


Parse = Callable[[Sequence[str] | None], argparse.Namespace]


def program(
    parse: Parse, run: Callable[[argparse.Namespace, Ranks], Any]
) -> Callable[[Sequence[str] | None], int]:
    """A benchmark's ``main(argv=None)``; its exit code is that of :func:`main`."""
    return lambda argv=None: main(parse(argv), run)


def main(options: argparse.Namespace, run: Callable[[argparse.Namespace, Ranks], Any]) -> int:
    """Exit code 2, and one line, for a ValueError; else the number that ``run`` returns, or 0."""
    quiet_logs()
    if options.threads:
        torch.set_num_threads(options.threads)
    backend = getattr(options, "backend", None)
    try:
        device = choose_device("cpu" if backend == "gloo" else getattr(options, "device", None))
        with connected(device, backend) as ranks:
            status = run(options, ranks)
            return status if isinstance(status, int) else 0
    except ValueError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
        return 2
