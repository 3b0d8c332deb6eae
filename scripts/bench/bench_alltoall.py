"""Time and bandwidth of the all-to-all by message size, algorithm and wire format.

    python -m fairseq_tutel.launch --nproc-per-node 2 -- python scripts/bench/bench_alltoall.py
    sbatch --nodes 64 --gpus-per-node 8 --exclusive scripts/slurm/bench_alltoall.sbatch
    sudo python scripts/bench/two_nodes.py --message-bytes 50000 -- \\
        python scripts/bench/bench_alltoall.py --sizes 4K,64K,1M --wires same,fp8

Algorithms and wire formats take turns, in the terms of nccl-tests. A message is what one rank hands
to one all-to-all, its own part included. Algorithm bandwidth is message over time; bus bandwidth is
that times (W-1)/W, the share that leaves a rank. A time is that of the slowest rank. "sent" are the
bytes that this node's network interface (GLOO_SOCKET_IFNAME) counts for one message.

Good: the bus bandwidth of large messages is near the link's speed; 2dh is faster than linear for
small messages between nodes whose network has a cost per message; fp8 sends a quarter of the bytes.
"""

import argparse
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import Case, Point, call, sweep
from program import Ranks, program, words

from fairseq_tutel.config import EXCHANGES, WIRES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups
from fairseq_tutel.distributed.exchanges import Exchange
from fairseq_tutel.moe.wire import WireCodec

_UNITS = {"K": 10, "M": 20, "G": 30}
_ELEMENT, _ROW = 4, 128  # bytes of fp32, numbers of a row
_COUNTED = 4  # all-to-alls whose bytes are counted


def parse_sizes(text: str) -> list[int]:
    """Read bytes from ``4096,64K,256M,1G`` (powers of 1024)."""
    found = []
    for word in text.split(","):
        number, unit = (word[:-1], word[-1].upper()) if word[-1:].isalpha() else (word, "")
        if not number.isdigit() or int(number) < 1 or (unit and unit not in _UNITS):
            raise argparse.ArgumentTypeError(f"{word!r} is no size such as 4096, 64K, 256M or 1G")
        found.append(int(number) << _UNITS.get(unit, 0))
    return found


OPTIONS = {
    "algorithms": (words, "default: all", EXCHANGES),
    "wires": (["same"], "formats of fp32 rows", WIRES),
    "sizes": (parse_sizes, "bytes per rank (default: 64K to 64M, on GPUs to 1G, times 4)"),
    "iterations": (20, "all-to-alls back to back per measurement"),
}


def link_name(backend: str) -> str:
    """Name the link of two_nodes.py in a word for a file name; else the backend."""
    bed = os.environ.get("TWO_NODES", "")
    return ("messages" if "--message-bytes" in bed else "bandwidth") if bed else backend


def sent_bytes() -> int | None:
    """Return the bytes that this node has sent on the link so far; None without an interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    table = Path("/proc/self/net/dev").read_text(encoding="ascii")
    found = re.search(rf"^\s*{interface}:((?:\s+\d+)+)", table, re.MULTILINE)
    return int(found[1].split()[8]) if found else None


def count_sent(case: Case, ranks: Ranks) -> float | None:
    """Return the bytes on the link of one all-to-all, of several after one that connects."""
    case.run()
    ranks.wait()
    before = sent_bytes()
    for _ in range(_COUNTED):
        case.run()
    ranks.wait()
    return None if before is None else (sent_bytes() - before) / _COUNTED


def points(
    sizes: list[int], algorithms: list[str], options: argparse.Namespace, ranks: Ranks
) -> Iterator[Point]:
    """Yield all algorithms and formats at each size."""
    groups, count = build_groups(ranks.world_size), ranks.world_size
    step = count * _ROW * _ELEMENT  # equal parts of whole rows
    for size in (max(step, size // step * step) for size in sizes):
        cases, columns = [], {}
        data = torch.randn(size // _ROW // _ELEMENT, _ROW, device=ranks.device)
        for name, wire in itertools.product(algorithms, options.wires):
            config = ExchangeConfig(name, wire=wire)
            plain = build_exchange(config, groups)
            codec = None if wire == "same" else WireCodec(config)
            exchange = Exchange(plain.algorithm, codec)
            title = name if wire == "same" else f"{name} {wire}"
            arguments = (data, None, exchange.new_record())
            cases.append(Case(title, call(functools.partial(exchange.dispatch, *arguments))))
            sent = count_sent(cases[-1], ranks)
            columns[title] = {"uses": exchange.name, "sent": sent}

        def derive(found, size=size, columns=columns):
            for title, of in found["ms"].items():
                speed = size / (1e6 * of["wall"]["p50"])
                bus = {"algbw GB/s": speed, "busbw GB/s": speed * (count - 1) / count}
                columns[title] |= bus
            return columns

        yield Point(f"{size:,}", cases, {"bytes": size}, derive=derive, phase="wall")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_several()
    algorithms = options.algorithms or sorted(EXCHANGES, reverse=True)  # linear first
    most = 30 if ranks.device.type == "cuda" else 26
    usual = [12, 16] if options.tiny else range(16, most + 1, 2)
    sizes = options.sizes or [1 << power for power in usual]
    link = link_name(ranks.backend)
    about = {"iterations": options.iterations, "backend": ranks.backend, "link": link}
    how = {"repetitions": 5, "calls": options.iterations, "warmup": 2}
    file = f"alltoall-{ranks.world_size}-{link}"
    found = points(sizes, algorithms, options, ranks)
    sweep("alltoall", options, ranks, found, file=file, about=about, **how)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
