"""Common parts of every benchmark: options, ranks, report, exit code."""

import argparse
import contextlib
import datetime
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import describe_run, quiet_logs, say, write_json

# name -> (default, help), or (default, help, names that are known)
Options = Mapping[str, tuple | None]


def words(text: str) -> list[str]:
    """Read an option with commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas."""
    return [int(word) for word in text.split(",")]


COMMON: Options = {
    "threads": (int, "CPU threads (default: torch's)"),
    "device": (str, "default: cuda if there is a GPU", ("cpu", "cuda")),
    "tiny": (False, "rehearsal: sizes and repetitions cut down"),
    "seed": (1, "of weights and inputs"),
    "repetitions": (int, "of each case (default: the benchmark's own number)"),
    "output": (Path, "JSON file (default: in runs/bench)"),
}
CLOCK: Options = {
    "clock": (
        "device",
        "processor: one thread's time, on a busy machine",
        ("device", "wall", "processor"),
    )
}


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job; ``backend`` is gloo or nccl, empty for a single one."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    backend: str = ""

    def expect_several(self) -> None:
        """Raise ValueError in a single process."""
        if self.world_size < 2:
            raise ValueError(
                "an exchange needs at least 2 ranks: put python -m fairseq_tutel.launch "
                "--nproc-per-node N -- before this command, or see two_nodes.py --help"
            )

    def expect_one(self) -> None:
        """Raise ValueError on several ranks."""
        if self.world_size > 1:
            raise ValueError(f"this measures one rank, not {self.world_size}")

    def wait(self) -> None:
        """Wait for all ranks and their devices."""
        if self.world_size > 1:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of any rank, element by element. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, element by element. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def agree(self, reasons: Mapping[str, str | None]) -> dict[str, str]:
        """Return name -> reason of what some rank cannot run: all take part or none. Collective."""
        anywhere = self.slowest([float(reason is not None) for reason in reasons.values()])
        pairs = zip(reasons.items(), anywhere, strict=True)
        return {name: why or "another rank cannot run it" for (name, why), skip in pairs if skip}

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp) -> list[float]:
        if self.world_size == 1:
            return list(values)
        on = self.device if self.backend == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=on)
        dist.all_reduce(tensor, op=how)
        return tensor.tolist()


def choose_device(name: str | None) -> torch.device:
    """Return the device of this local rank; ValueError if there is no such device."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this process sees no GPU")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextlib.contextmanager
def connected(device: torch.device) -> Iterator[Ranks]:
    """Form a process group if the environment names several ranks; a group that is there stays.

    They meet at MASTER_ADDR:MASTER_PORT, or at INIT_METHOD (a file, see two_nodes.py).
    """
    if dist.is_initialized():
        yield Ranks(device, dist.get_rank(), dist.get_world_size(), dist.get_backend())
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=os.environ.get("INIT_METHOD", "env://"),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=datetime.timedelta(minutes=5),
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield Ranks(device, dist.get_rank(), world_size, backend)
    finally:
        dist.destroy_process_group()


def program(
    doc: str,
    options: Options,
    run: Callable[[argparse.Namespace, Ranks], Any],
    presets: Mapping[str, Any] | None = None,
) -> Callable[..., int]:
    """Make the ``main(argv=None)`` of a benchmark; a ValueError is one line and exit code 2.

    Args:
        doc: docstring of the benchmark, printed by ``--help``.
        options: beside or in place of those in COMMON; None: without that one. A list is given
            with commas. A type, ``words`` or ``numbers`` as default means None by default.
        run: measures, prints and writes; may return an exit code.
        presets: name -> something with an ``about``, listed by ``--help``.
    """
    options = {name: given for name, given in {**COMMON, **options}.items() if given}
    about = [f"  {name:16s} {preset.about}" for name, preset in (presets or {}).items()]

    def main(argv: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(
            description=doc,
            epilog="\n".join(["presets:", *about]) if about else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, given in options.items():
            _add_option(parser, name, *given)
        given = parser.parse_args(argv)
        given.argv = sys.argv[1:] if argv is None else argv
        warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
        quiet_logs()
        if given.threads:
            torch.set_num_threads(given.threads)
        try:
            for name, (_, _, *known) in options.items():
                known = known or ([presets] if name == "preset" else [])
                if known:
                    expect_known(name, getattr(given, name.replace("-", "_")), known[0])
            with connected(choose_device(given.device)) as ranks:
                _check_clock(given, ranks)
                return run(given, ranks) or 0
        except ValueError as error:
            sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
            return 2

    return main


def _add_option(parser: argparse.ArgumentParser, name: str, default, text: str, known=()) -> None:
    text += f"; of {', '.join(known)}" if known else ""
    if default is False:
        parser.add_argument(f"--{name}", action="store_true", help=text)
    elif callable(default):
        parser.add_argument(f"--{name}", type=default, help=text)
    else:
        several = isinstance(default, list)
        shown = ",".join(default) if several else default
        kind = words if several else type(default)
        about = f"{text} (default: {shown})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)


def _check_clock(options: argparse.Namespace, ranks: Ranks) -> None:
    clock, threads = getattr(options, "clock", "device"), torch.get_num_threads()
    if clock == "processor" and (threads, ranks.world_size, ranks.device.type) != (1, 1, "cpu"):
        raise ValueError(
            f"--clock processor: for one thread of one rank on a CPU, not {threads} of each of "
            f"{ranks.world_size} on {ranks.device.type}"
        )


def expect_known(option: str, given: str | Sequence[str] | None, known: Sequence[str]) -> None:
    """Raise ValueError for names that an option does not know."""
    names = [given] if isinstance(given, str) else given or []
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--{option} {','.join(unknown)}: choose from {', '.join(known)}")


class Report:
    """Result of a benchmark, from the start of the measurement to its file.

    Use as a context manager: an interrupted run writes its result and prints its goals.

    Args:
        path: of the JSON file; None: ``runs/bench/DEFAULT.json``.
        about: known before the measurement.
    """

    seconds_between = 5.0  # two writes of a result that is not complete

    def __init__(
        self, benchmark: str, ranks: Ranks, path: Path | str | None, default: str, **about
    ):
        self.ranks, self.path = ranks, Path(path or f"runs/bench/{default}.json")
        self._about = {**describe_run(benchmark, ranks.device, ranks.world_size), **about}
        self._written, self._said = -math.inf, set()
        self._latest: Callable[[], dict[str, Any]] | None = None

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None and self._latest and self.ranks.world_size == 1:
            self.keep(self._latest, ended=True)

    def keep(self, measured: Callable[[], dict[str, Any]], *, ended: bool = False) -> None:
        """Write what is measured so far, every few seconds.

        Args:
            ended: a case has ended: write now and print its goals.
        """
        self._latest = measured
        due = time.monotonic() - self._written >= self.seconds_between
        if self.ranks.rank == 0 and (ended or due):
            result = measured()
            write_json({**self._about, **result, "complete": False}, self.path)
            self._written = time.monotonic()
            if ended:
                self._say_goals(result)

    def _say_goals(self, result: dict[str, Any]) -> None:
        for each in result.get("goals", ()):
            if each["goal"] not in self._said:
                verdict = "reached" if each["reached"] else "NOT reached"
                say(f"goal: {each['goal']}: {each['ratio']:.2f}, {verdict}")
                self._said.add(each["goal"])

    def finish(self, measured: dict[str, Any], show: Callable[[dict], None]) -> None:
        """Print and write the result; all ranks call."""
        if self.ranks.rank:
            return
        result = {**self._about, **measured}
        quiet_logs()
        show(result)
        for name, reason in result.get("not_run", {}).items():
            say(f"{name}: not run: {reason}")
        self._say_goals(result)
        write_json(result, self.path)
        say(f"written: {self.path}")


def goal(text: str, ratio: float, bound: float, at_most: bool = False) -> dict[str, Any]:
    """Return a goal of a result: a ratio and its bound, from below or from above."""
    reached = ratio <= bound if at_most else ratio >= bound
    return {"goal": text, "ratio": ratio, "bound": bound, "reached": reached}
