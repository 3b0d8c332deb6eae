"""Common parts of every benchmark: options, ranks, exit code."""

import argparse
import contextlib
import datetime
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fairseq_tutel.command_line import CommandLine
from fairseq_tutel.distributed import gather_texts, process_world

# name -> (default, help), or (default, help, names that are known); None: without the option
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
_CLOCKS = ("device", "wall", "processor")
CLOCK: Options = {"clock": ("device", "processor: one thread's time, on a busy machine", _CLOCKS)}


class Ranks:
    """This process among those of the job; ``backend`` is gloo or nccl, empty for a single one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.world_size = process_world()
        self.backend = dist.get_backend() if self.world_size > 1 else ""

    def expect(self, *, several: bool) -> None:
        """Raise ValueError if this is the only process, or one of several."""
        if several and self.world_size < 2:
            raise ValueError(
                "an exchange needs at least 2 ranks: put python -m fairseq_tutel.launch "
                "--nproc-per-node N -- before this command, or see two_nodes.py --help"
            )
        if self.world_size > 1 and not several:
            raise ValueError(f"this measures one rank, not {self.world_size}")

    def wait(self) -> None:
        """Wait for all ranks and their devices."""
        if self.world_size > 1:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of any rank, element by element. Collective."""
        if self.world_size == 1:
            return list(values)
        on = self.device if self.backend == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=on)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def agree(self, reasons: Mapping[str, str | None]) -> dict[str, str]:
        """Return name -> reason of what some rank cannot run: all take part or none. Collective."""
        of_all = {name: gather_texts(reason) for name, reason in reasons.items()}
        return {name: next(filter(None, texts)) for name, texts in of_all.items() if any(texts)}


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
    """Form a process group if the environment names several ranks; a group that is there stays."""
    begin = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if begin:
        on_gpu, timeout = device.type == "cuda", datetime.timedelta(minutes=5)
        how = {"backend": "nccl", "device_id": device} if on_gpu else {"backend": "gloo"}
        dist.init_process_group(timeout=timeout, **how)
    try:
        yield Ranks(device)
    finally:
        if begin:
            dist.destroy_process_group()


def program(doc: str, options: Options) -> Callable[[Callable], Callable[..., int]]:
    """Decorate a function of (options, ranks): it becomes a benchmark's ``main(argv=None)``.

    ``main`` returns the function's result as exit code, 0 for None. A ValueError is one line and
    exit code 2.

    Args:
        doc: docstring of the benchmark, printed by ``--help`` with the presets.
        options: beside or in place of those in COMMON. A list is given with commas. A type,
            ``words`` or ``numbers`` as default means None by default.
    """
    options = {name: given for name, given in {**COMMON, **options}.items() if given}
    return lambda run: functools.partial(_main, doc, options, run)


def _main(doc, options, run, argv: Sequence[str] | None = None) -> int:
    *_, presets = options.get("preset", ({},))
    about = [f"  {name:16s} {preset.about}" for name, preset in presets.items()]
    parser = CommandLine(
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
            if known:
                expect_known(name, getattr(given, name.replace("-", "_")), *known)
        with connected(choose_device(given.device)) as ranks:
            _check_clock(given, ranks)
            return run(given, ranks) or 0
    except ValueError as error:
        parser.error(str(error))


def _add_option(parser: argparse.ArgumentParser, name: str, default, text: str, known=()) -> None:
    if known and name != "preset":
        text += f"; of {', '.join(known)}"
    if default is False:
        parser.add_argument(f"--{name}", action="store_true", help=text)
    elif callable(default):
        parser.add_argument(f"--{name}", type=default, help=text)
    else:
        several = isinstance(default, list)
        kind = words if several else type(default)
        text += f" (default: {','.join(default) if several else default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)


def _check_clock(options: argparse.Namespace, ranks: Ranks) -> None:
    clock, threads = getattr(options, "clock", "device"), torch.get_num_threads()
    if clock == "processor" and (threads, ranks.world_size, ranks.device.type) != (1, 1, "cpu"):
        raise ValueError(
            f"--clock processor: for one thread of one rank on a CPU, not {threads} of each of "
            f"{ranks.world_size} on {ranks.device.type}"
        )


def expect_known(option: str, given: str | Sequence[str] | None, known: Collection[str]) -> None:
    """Raise ValueError for names that an option does not know."""
    names = [given] if isinstance(given, str) else given or []
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--{option} {','.join(unknown)}: choose from {', '.join(known)}")


def quiet_logs() -> None:
    """Let loggers print warnings and errors only; importing fairseq turns everything on."""
    logging.getLogger().setLevel(logging.WARNING)
