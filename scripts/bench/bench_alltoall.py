"""Time and bandwidth of the all-to-all by message size and algorithm, in the terms of nccl-tests.

    python -m fairseq_tutel.launch --nproc-per-node 2 -- python scripts/bench/bench_alltoall.py
    sbatch --nodes 64 --gpus-per-node 8 --exclusive scripts/slurm/bench_alltoall.sbatch
    sudo python scripts/bench/two_nodes.py --message-bytes 50000 -- \\
        python scripts/bench/bench_alltoall.py --sizes 4K,64K,1M --algorithms linear,2dh

A message is what one rank hands to one all-to-all, its own part included. Algorithm bandwidth is
message over time; bus bandwidth is that times (W-1)/W, the share that leaves a rank, and can be
compared between numbers of ranks and with the link's speed. Algorithms take turns in random order;
a time is that of the slowest rank.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from measure import percentiles
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_defaults, command_line, expect_known, words
from torch import Tensor

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups

_UNITS = {"K": 10, "M": 20, "G": 30}
_ELEMENT = 4  # bytes of fp32
_UNEVEN = " uneven"
_DEFAULTS = {
    "iterations": (20, "all-to-alls per measurement"),
    "repetitions": (5, "measurements per size"),
    "ranks-per-node": (0, "0: as the machines have it"),
}


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``64K``, ``256M`` or ``1G`` (powers of 1024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or int(number) < 1 or (unit and unit not in _UNITS):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096, 64K, 256M or 1G")
    return int(number) << _UNITS.get(unit, 0)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--backend", choices=["gloo", "nccl"], help="default: nccl on GPUs, gloo on CPUs")
    every = f"of {', '.join(algorithms())} (default: all)"
    add("--algorithms", default=algorithms(), help=every, **words())
    usual = "default: 64K to 64M, on GPUs to 1G, times 4"
    add("--sizes", help=f"bytes per rank ({usual})", **words(parse_size))
    add_defaults(parser, _DEFAULTS)
    add("--output", type=Path, help="JSON file (default: runs/bench/alltoall-W-LINK.json)")
    return parser.parse_args(argv)


def algorithms() -> list[str]:
    """Every registered exchange with equal parts, and with the sizes of the parts given."""
    return [f"{name}{kind}" for name in EXCHANGES for kind in ("", _UNEVEN)]


def link_name(backend: str) -> str:
    """The bed that two_nodes.py made, in a word for a file name; else the backend."""
    bed = os.environ.get("TWO_NODES", "")
    return ("messages" if "--message-bytes" in bed else "bandwidth") if bed else backend


def interleaved(
    variants: Mapping[str, Callable[[], Any]], ranks: Ranks, repetitions: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every repetition of each variant, on the slowest rank; variants take turns.

    In random order, the same on all ranks: what an exchange leaves in the link's queue hits
    whichever comes next.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warmup, repetitions):
        for name in random.Random(number).sample(names, len(names)):
            ranks.wait()
            begin = time.perf_counter()
            variants[name]()
            ranks.wait_for_device()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: ranks.slowest(times) for name, times in seconds.items()}


def message(size: int, ranks: Ranks, order: Sequence[int] | None = None) -> Tensor:
    """[W * n] fp32: the part for rank w holds the number of the way from this rank to rank w.

    Args:
        order: rank that each part is for; None for rank order.
    """
    part = size // _ELEMENT // ranks.world_size
    to = torch.tensor(order or range(ranks.world_size), device=ranks.device)
    ways = ranks.rank * ranks.world_size + to
    return ways.to(torch.float32).repeat_interleave(part)


def check(received: Tensor, ranks: Ranks, algorithm: str) -> None:
    """Raise RuntimeError unless every part came from the right rank."""
    sources = torch.arange(ranks.world_size, device=ranks.device)
    ways = (sources * ranks.world_size + ranks.rank).to(torch.float32)
    if not torch.equal(received, ways.repeat_interleave(len(received) // ranks.world_size)):
        raise RuntimeError(f"{algorithm}: rank {ranks.rank} received the wrong parts")


def measure(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """One row per size and algorithm."""
    groups = build_groups(ranks.world_size)
    rows = []
    for given in options.sizes:
        step = ranks.world_size * _ELEMENT  # equal parts of fp32 numbers
        size = max(step, given // step * step)
        variants, used = {}, {}
        for name in options.algorithms:
            config = ExchangeConfig(name.removesuffix(_UNEVEN), options.ranks_per_node)
            exchange = build_exchange(config, groups)
            data, splits = message(size, ranks, exchange.algorithm.send_order), None
            if name.endswith(_UNEVEN):
                part = torch.full((ranks.world_size,), len(data) // ranks.world_size)
                ((_, splits),) = exchange.algorithm.share_chunks(part.to(ranks.device), 1)
            check(exchange.dispatch(data, splits), ranks, name)

            def several(exchange=exchange, data=data, splits=splits):
                for _ in range(options.iterations):
                    exchange.dispatch(data, splits)

            variants[name], used[name] = several, exchange.name
        for name, total in interleaved(variants, ranks, options.repetitions).items():
            seconds = [spent / options.iterations for spent in total]
            spread = percentiles(seconds)
            bandwidth = size / spread["p50"]
            rows.append(
                {
                    "algorithm": name,
                    "exchange": used[name],
                    "bytes": size,
                    "bytes_per_peer": size // ranks.world_size,
                    "seconds": spread,
                    "raw_seconds": seconds,
                    "algbw": bandwidth,
                    "busbw": bandwidth * (ranks.world_size - 1) / ranks.world_size,
                }
            )
    return rows


def size_ratios(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """By size: linear over 2dh, of medians."""
    found: dict[str, dict[str, float]] = {}
    rows = [row for row in rows if not row["algorithm"].endswith(_UNEVEN)]
    for size, same in itertools.groupby(rows, key=lambda row: row["bytes"]):
        median = {row["exchange"]: statistics.median(row["raw_seconds"]) for row in same}
        ratios = found[str(size)] = {}
        if {"linear", "2dh"} <= set(median):
            ratios["linear/2dh"] = median["linear"] / median["2dh"]
    return found


def about_ranks(result: dict[str, Any]) -> str:
    """What ran where, for the line above a table."""
    ranks = f"{result['world_size']} ranks, {result['backend']}, {result['link']}"
    return f"{result.get('part', result['benchmark'])}: {ranks}, {device_name(result)}"


def print_result(result: dict[str, Any]) -> None:
    """The table."""
    say(about_ranks(result))

    def ratio(row):
        found = result["ratios"].get(str(row["bytes"]), {}).get("linear/2dh")
        return f"{found:.2f}" if found and row["algorithm"] == "2dh" else ""

    shown = {
        "algorithm": "{algorithm}",
        "uses": "{exchange}",
        "bytes": "{bytes:,}",
        **{f"{p} ms": f"{{ms[{p}]:,.4g}}" for p in ("p20", "p50", "p80")},
        "algbw GB/s": "{algbw:.3g}",
        "busbw GB/s": "{busbw:.3g}",
        "linear/2dh": ratio,
    }
    rows = []
    for row in result["results"]:
        ms = {key: 1e3 * value for key, value in row["seconds"].items()}
        speeds = {"algbw": row["algbw"] / 1e9, "busbw": row["busbw"] / 1e9}
        rows.append({**row, **speeds, "ms": ms})
    say(table(rows, shown))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_several()
    expect_known("--algorithms", options.algorithms, algorithms())
    if options.sizes is None:
        most = 30 if ranks.device.type == "cuda" else 26
        options.sizes = [1 << power for power in range(16, most + 1, 2)]
    link = link_name(ranks.backend)
    path = options.output or Path(f"runs/bench/alltoall-{ranks.world_size}-{link}.json")
    names = ("algorithms", "iterations", "repetitions", "ranks_per_node")
    settings = {name: getattr(options, name) for name in names}
    report = Report("alltoall", ranks, path, backend=ranks.backend, link=link, settings=settings)
    rows = measure(options, ranks)
    measured = {"results": rows, "ratios": size_ratios(rows)}
    report.finish(measured, print_result)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
