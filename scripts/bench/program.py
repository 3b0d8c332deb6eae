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

COMMON = {
    "threads": (int, "CPU threads (default: torch's)"),
    "device": (str, "cpu or cuda (default: cuda if there is a GPU)"),
    "tiny": (False, "rehearsal: sizes and repetitions cut down"),
    "seed": (1, "of weights and inputs"),
    "output": (Path, "JSON file (default: in runs/bench)"),
}
CLOCK = {"clock": ("device", "device, wall, or processor: of one thread on a busy machine")}
Options = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job; ``backend`` is gloo or nccl, empty for a single one."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    backend: str = ""

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

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
    expect_known("--device", [name], ["cpu", "cuda"])
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this process sees no GPU")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextlib.contextmanager
def connected(device: torch.device, backend: str | None = None) -> Iterator[Ranks]:
    """Form a process group if the environment names several ranks.

    They meet at MASTER_ADDR:MASTER_PORT, or at INIT_METHOD (a file, see two_nodes.py).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(device)
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
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


def words(text: str) -> list[str]:
    """Read an option with commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas."""
    return [int(word) for word in text.split(",")]


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add options from name -> (default, help).

    A type, ``words`` or ``numbers`` in place of a default means None by default.
    """
    for name, (default, text) in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        elif callable(default):
            parser.add_argument(f"--{name}", type=default, help=text)
        else:
            kind = words if isinstance(default, list) else type(default)
            shown = ",".join(default) if isinstance(default, list) else default
            about = f"{text} (default: {shown})" if shown != "" else text
            parser.add_argument(f"--{name}", type=kind, default=default, help=about)


def program(
    doc: str,
    options: Options,
    run: Callable[[argparse.Namespace, Ranks], Any],
    presets: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Callable[..., int]:
    """Make the ``main(argv=None)`` of a benchmark; a ValueError is one line and exit code 2.

    Args:
        doc: docstring of the benchmark, printed by ``--help``.
        options: beside or in place of those in COMMON.
        run: measures, prints and writes; may return an exit code.
        presets: name -> something with an ``about``, listed by ``--help``.
        backend: of the process group (default: nccl for GPUs); gloo means a CPU.
    """
    about = [f"  {name:16s} {preset.about}" for name, preset in (presets or {}).items()]

    def main(argv: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(
            description=doc,
            epilog="\n".join(["presets:", *about]) if about else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(parser, {**COMMON, **options})
        given = parser.parse_args(argv)
        warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
        quiet_logs()
        if given.threads:
            torch.set_num_threads(given.threads)
        wanted = getattr(given, "backend", None) or backend
        try:
            device = choose_device("cpu" if wanted == "gloo" else given.device)
            with connected(device, wanted) as ranks:
                _check_clock(given, ranks)
                return run(given, ranks) or 0
        except ValueError as error:
            sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
            return 2

    return main


def _check_clock(options: argparse.Namespace, ranks: Ranks) -> None:
    clock, threads = getattr(options, "clock", "device"), torch.get_num_threads()
    expect_known("--clock", [clock], ["device", "wall", "processor"])
    if clock == "processor" and (threads, ranks.world_size, ranks.device.type) != (1, 1, "cpu"):
        raise ValueError(
            f"--clock processor: for one thread of one rank on a CPU, not {threads} of each of "
            f"{ranks.world_size} on {ranks.device.type}"
        )


def preset_of(options: argparse.Namespace, ranks: Ranks, on_gpu: str, on_cpu: str, known) -> str:
    """Return the name of the chosen preset, or the device's default."""
    name = options.preset or (on_gpu if ranks.device.type == "cuda" else on_cpu)
    expect_known("--preset", [name], list(known))
    return name


def expect_known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for names that an option does not know."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option} {','.join(unknown)}: choose from {', '.join(known)}")


class Report:
    """Result of a benchmark, from the start of the measurement to its file.

    Use as a context manager: an interrupted run writes its result and prints its goals.

    Args:
        path: of the JSON file; None: ``runs/bench/DEFAULT.json``.
        about: known before the measurement.
    """

    seconds_between = 5.0  # two writes of a result that is not complete

    def __init__(self, benchmark: str, ranks: Ranks, path: Path | None, default: str, **about):
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
        if self.ranks.first and (ended or due):
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
        if not self.ranks.first:
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
    """Goal of a result: a ratio and its bound, from below or from above."""
    reached = ratio <= bound if at_most else ratio >= bound
    return {"goal": text, "ratio": ratio, "bound": bound, "reached": reached}
