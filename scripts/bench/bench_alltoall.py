"""Time and bandwidth of the all-to-all by message size, algorithm and wire format.

    python -m fairseq_tutel.launch --nproc-per-node 2 -- python scripts/bench/bench_alltoall.py
    sbatch --nodes 64 --gpus-per-node 8 --exclusive scripts/slurm/bench.sbatch alltoall
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
from pathlib import Path

import torch
from harness import Case, Point, call, sweep
from program import Ranks, program, words

from fairseq_tutel.config import EXCHANGES, WIRES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups
from fairseq_tutel.distributed.exchanges import Exchange
from fairseq_tutel.moe.wire import WireCodec

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30}
_ELEMENT, _ROW = 4, 128  # bytes of fp32, numbers of a row
_COUNTED = 4  # all-to-alls whose bytes are counted


def parse_sizes(text: str) -> list[int]:
    """Read bytes from ``4096,64K,256M,1G`` (powers of 1024)."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([KMG]?)", word.upper())
        if not match:
            raise argparse.ArgumentTypeError(f"{word!r} is no size such as 4096, 64K, 256M or 1G")
        found.append(int(match[1]) << _POWERS[match[2]])
    return found


OPTIONS = {
    "algorithms": (words, "default: all", EXCHANGES),
    "wires": (["same"], "formats of fp32 rows", ("same", *WIRES)),
    "sizes": (parse_sizes, "bytes per rank (default: 64K to 64M, on GPUs to 1G, times 4)"),
    "iterations": (20, "all-to-alls back to back per measurement"),
}


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
    ranks.wait()  # the other ranks of this node have not sent more yet
    for _ in range(_COUNTED):
        case.run()
    ranks.wait()
    after = sent_bytes()
    ranks.wait()
    return None if before is None else (after - before) / _COUNTED


def point_of(size, options, ranks) -> Point:
    """Return all algorithms and formats at one size."""
    groups, count = build_groups(ranks.world_size), ranks.world_size
    step = count * _ROW * _ELEMENT  # equal parts of whole rows
    size = max(step, size // step * step)
    cases, columns = [], {}
    data = torch.randn(size // _ROW // _ELEMENT, _ROW, device=ranks.device)
    algorithms = options.algorithms or sorted(EXCHANGES, reverse=True)  # linear first
    for name, wire in itertools.product(algorithms, options.wires):
        config = ExchangeConfig(name, wire=wire)
        codec = None if wire == "same" else WireCodec(config)
        exchange = Exchange(build_exchange(config, groups).algorithm, codec)
        title = name if wire == "same" else f"{name} {wire}"
        move = functools.partial(exchange.dispatch, data, None, exchange.new_record())
        cases.append(Case(title, call(lambda _, move=move: move())))
        columns[title] = {"uses": exchange.name, "sent": count_sent(cases[-1], ranks)}

    def derive(found):
        derived = {}
        for title, of in found["ms"].items():
            speed = size / (1e6 * of["wall"]["p50"])
            bus = {"algbw GB/s": speed, "busbw GB/s": speed * (count - 1) / count}
            derived[title] = columns[title] | bus
        return derived

    return Point(f"{size:,}", cases, {"bytes": size}, derive=derive, phase="wall")


@program(__doc__, OPTIONS)
def main(options, ranks):
    ranks.expect(several=True)
    most = 30 if ranks.device.type == "cuda" else 26
    usual = [12, 16] if options.tiny else range(16, most + 1, 2)
    sizes = options.sizes or [1 << power for power in usual]
    bed, link = os.environ.get("TWO_NODES"), ranks.backend
    if bed:  # two_nodes.py: its link in a word for the file's name
        link = "messages" if "--message-bytes" in bed else "bandwidth"
    about = {"iterations": options.iterations, "backend": ranks.backend, "link": link}
    how = {"repetitions": 5, "calls": options.iterations, "warmup": 2}
    how |= {"file": f"alltoall-{ranks.world_size}-{link}", "about": about}
    points = (point_of(size, options, ranks) for size in sizes)
    sweep("alltoall", options, ranks, points, **how)


if __name__ == "__main__":
    sys.exit(main())
