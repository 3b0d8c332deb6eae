"""Bandwidth of the all-to-all by message size and algorithm, in the terms of nccl-tests.

    python -m fairseq_tutel.launch --nproc-per-node 2 -- python scripts/bench/bench_alltoall.py
    sbatch --nodes 64 --gpus-per-node 8 --exclusive scripts/slurm/bench_alltoall.sbatch

A message is what one rank hands to one all-to-all, its own part included. Algorithm bandwidth is
message over time; bus bandwidth is that times (W-1)/W, the share that leaves a rank, and can be
compared between numbers of ranks and with the link's speed. The times are those of the slowest
rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from measure import percentiles
from ranks import Ranks, choose_device, connected
from record import describe_run, device_name, quiet_logs, say, table, write_json
from torch import Tensor

from fairseq_tutel.config import EXCHANGES, ExchangeConfig
from fairseq_tutel.distributed import Exchange, build_exchange, build_groups
from fairseq_tutel.distributed.exchanges import Parts

_UNITS = {"K": 10, "M": 20, "G": 30}
_ELEMENT = 4  # bytes of fp32
_UNEVEN = " uneven"


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``64K``, ``256M`` or ``1G`` (powers of 1024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or int(number) < 1 or (unit and unit not in _UNITS):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096, 64K, 256M or 1G")
    return int(number) << _UNITS.get(unit, 0)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--backend", choices=["gloo", "nccl"], help="default: nccl on GPUs, gloo on CPUs")
    add(
        "--algorithms",
        type=lambda text: text.split(","),
        default=algorithms(),
        metavar="LIST",
        help=f"of {', '.join(algorithms())} (default: all)",
    )
    add("--ranks-per-node", type=int, default=0, help="default: as the machines have it")
    add("--min-bytes", type=parse_size, default=64 << 10, metavar="SIZE", help="default: 64K")
    add("--max-bytes", type=parse_size, metavar="SIZE", help="default: 1G on GPUs, 64M on CPUs")
    add("--factor", type=int, default=4, help="between sizes (default: 4)")
    add("--iterations", type=int, default=20, help="all-to-alls per measurement (default: 20)")
    add("--repetitions", type=int, default=5, help="measurements per size (default: 5)")
    add("--output", type=Path, help="JSON file (default: runs/bench/alltoall-W-BACKEND.json)")
    add("--figure", type=Path, help="PNG file (default: beside the JSON file)")
    return parser.parse_args(argv)


def algorithms() -> list[str]:
    """Every registered exchange with equal parts, and with the sizes of the parts given."""
    return [f"{name}{kind}" for name in EXCHANGES for kind in ("", _UNEVEN)]


def for_size(algorithm: str, built: Exchange, size: int) -> tuple[Exchange, Parts | None]:
    """What the layer would use for messages of so many bytes, all parts of one size."""
    exchange = built.for_message(size)
    if not algorithm.endswith(_UNEVEN):
        return exchange, None
    ranks = built.groups.ep_size
    part = [size // _ELEMENT // ranks] * ranks
    return exchange, exchange.parts(part, part)


def sizes(options: argparse.Namespace, world_size: int, device_type: str) -> list[int]:
    """Message sizes in bytes, multiples of what W equal parts of fp32 numbers take.

    Raises:
        ValueError: there are none.
    """
    largest = options.max_bytes or (1 << 30 if device_type == "cuda" else 64 << 20)
    if options.min_bytes > largest or options.factor < 2:
        raise ValueError(
            f"--min-bytes {options.min_bytes} --max-bytes {largest} --factor {options.factor} "
            "leave no sizes"
        )
    step = world_size * _ELEMENT
    found, size = [], options.min_bytes
    while size <= largest:
        found.append(max(step, size // step * step))
        size *= options.factor
    return found


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
    want = (sources * ranks.world_size + ranks.rank).to(torch.float32)
    if not torch.equal(
        received.view(ranks.world_size, -1),
        want[:, None].expand(-1, received.numel() // ranks.world_size),
    ):
        raise RuntimeError(f"{algorithm}: rank {ranks.rank} received the wrong parts")


def time_exchange(exchange, rows, parts, ranks: Ranks, iterations: int) -> float:
    """Seconds of one all-to-all, mean over ``iterations``."""
    ranks.barrier()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(iterations):
        exchange.forth(rows, parts)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / iterations


def measure(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """One row per size and algorithm; repetitions of all algorithms take turns."""
    groups = build_groups(ranks.world_size)
    built = {
        name: build_exchange(
            ExchangeConfig(name.removesuffix(_UNEVEN), options.ranks_per_node), groups
        )
        for name in options.algorithms
    }
    rows = []
    for size in sizes(options, ranks.world_size, ranks.device.type):
        cases, seconds = {}, {name: [] for name in built}
        for name in built:
            exchange, parts = for_size(name, built[name], size)
            data = message(size, ranks, exchange.send_order)
            check(exchange.forth(data, parts), ranks, name)
            cases[name] = (exchange, data, parts)
            time_exchange(*cases[name], ranks, 2)
        for _ in range(options.repetitions):
            for name, case in cases.items():
                seconds[name].append(time_exchange(*case, ranks, options.iterations))
        for name in built:
            spread = percentiles(ranks.slowest(seconds[name]))
            bandwidth = size / spread["p50"]
            rows.append(
                {
                    "algorithm": name,
                    "exchange": cases[name][0].name,
                    "bytes": size,
                    "bytes_per_peer": size // ranks.world_size,
                    "seconds": spread,
                    "algbw": bandwidth,
                    "busbw": bandwidth * (ranks.world_size - 1) / ranks.world_size,
                }
            )
    return rows


def print_result(result: dict[str, Any]) -> None:
    """The table."""
    say(
        f"all-to-all between {result['world_size']} ranks, {result['backend']}, "
        f"{device_name(result)}"
    )
    lines = [
        [
            row["algorithm"],
            f"{row['bytes']:,}",
            f"{row['bytes_per_peer']:,}",
            *(f"{1e6 * row['seconds'][key]:,.1f}" for key in ("p20", "p50", "p80")),
            f"{row['algbw'] / 1e9:.3f}",
            f"{row['busbw'] / 1e9:.3f}",
        ]
        for row in result["results"]
    ]
    say(
        table(
            [
                "algorithm",
                "bytes",
                "per peer",
                "p20 us",
                "p50 us",
                "p80 us",
                "algbw GB/s",
                "busbw GB/s",
            ],
            lines,
        )
    )


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write."""
    if ranks.world_size < 2:
        raise ValueError(
            "an all-to-all needs at least 2 ranks: start this with python -m fairseq_tutel.launch "
            "--nproc-per-node N -- python scripts/bench/bench_alltoall.py"
        )
    unknown = [name for name in options.algorithms if name not in algorithms()]
    if unknown:
        raise ValueError(f"--algorithms {','.join(unknown)}: choose from {', '.join(algorithms())}")
    rows = measure(options, ranks)
    result = {
        **describe_run("alltoall", ranks.device, ranks.world_size),
        "backend": ranks.backend,
        "settings": {
            "algorithms": options.algorithms,
            "iterations": options.iterations,
            "repetitions": options.repetitions,
            "ranks_per_node": options.ranks_per_node,
        },
        "results": rows,
    }
    if ranks.first:
        print_result(result)
        path = options.output or Path(
            f"runs/bench/alltoall-{ranks.world_size}-{ranks.backend}.json"
        )
        write_json(result, path)
        say(f"written: {path}")
        picture = options.figure or path.with_suffix(".png")
        if figures.draw(result, picture):
            say(f"drawn: {picture}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    quiet_logs()
    try:
        device = choose_device("cpu" if options.backend == "gloo" else options.device)
        with connected(device, options.backend) as ranks:
            run(options, ranks)
    except ValueError as error:
        sys.stderr.write(f"bench_alltoall.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
