"""Time of a dropless layer on 2 gloo ranks against util_rank: a part of routing_study.py."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.moe import MoELayer, routing_counts, utilisation

RANKS, DIM, HIDDEN, EXPERTS, TOKENS, STEPS = 2, 256, 1024, 8, 1024, 12
SKEWS = (0.0, 0.3, 0.6, 1.0, 2.0)  # added to the logits of the first rank's experts


def measure() -> list[dict[str, float]]:
    """util_rank and milliseconds of a forward and backward pass, one row per skew."""
    spawn = multiprocessing.get_context("spawn")
    found = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=_rank, args=(rank, f"file://{folder}/meet", found))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}")
    return found.get()


def share_that_scales(rows: list[dict[str, float]]) -> float:
    """x of ``time = t * (1 - x + x / util_rank)``, by least squares."""
    inverse = [100 / row["util_rank"] for row in rows]
    times = [row["ms"] for row in rows]
    slope, start = statistics.linear_regression(inverse, times)
    return slope / (slope + start)


def _rank(rank: int, meet: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layer = MoELayer(DIM, EXPERTS, HIDDEN, capacity_factor=0, load_bias="sign", seed=1)
    torch.manual_seed(1 + rank)
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    times: dict[float, list[float]] = {skew: [] for skew in SKEWS}
    used = {}
    for step in range(-2, STEPS):
        for skew in SKEWS:  # they take turns
            layer.gate.load_bias[: EXPERTS // RANKS] = skew
            dist.barrier()
            begin = time.perf_counter()
            y, aux = layer(x, return_aux=True)
            y.sum().backward()
            dist.barrier()
            if step >= 0:
                times[skew].append(1e3 * (time.perf_counter() - begin))
            counts = routing_counts([aux], layer.groups)
            for count in counts:
                dist.all_reduce(count)
            used[skew] = utilisation(counts).rank.item()
    if rank == 0:
        rows = [
            {"skew": skew, "util_rank": used[skew], "ms": statistics.median(times[skew])}
            for skew in SKEWS
        ]
        found.put(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    table = measure()
    print(table, share_that_scales(table))
