"""How many rows pay for moving an expert's weights to a helper.

An expert of N weights takes 2 N FLOPs per row in the forward pass, and 6 N with the backward pass.
Moving it takes N numbers there, and N gradients back. N cancels, so the answer depends on the
machine alone: the speed of products in FLOP/s, the speed of a rank's link in bytes/s, and the bytes
of a number::

    rows = bytes * FLOP/s / (2 * bytes/s)    in evaluation
    rows = bytes * FLOP/s / (3 * bytes/s)    in training

With activation checkpointing the weights travel twice and the forward pass is computed twice, so
the factor lies between the two.

A row of M numbers may start to travel because a helper computes it: 2 M numbers in evaluation, and
4 M with its gradients. That takes as long as ``rows * 2 M / N`` rows to compute, in both cases.
"""

import math
import time

import torch
import torch.distributed as dist

from ..placement.groups import ExpertParallelGroups
from ..world import gather_integers, once_per_world

# rows and width of a product that is timed, and numbers of a message: those of a small expert, and
# on a GPU so many that its latency hardly counts
_SIZES, _SIZES_ON_GPU = (256, 512, 2**19), (8192, 4096, 2**25)
_REPETITIONS = 5


def break_even_rows(flops: float, bandwidth: float, element: int, *, training: bool) -> int:
    """Return how many rows take as long to compute as an expert's weights take to travel.

    >>> break_even_rows(400e12, 360e9, 2, training=True)  # H100 with NVLink, bf16
    741

    Args:
        flops: FLOP per second of the experts' products.
        bandwidth: bytes per second that a rank sends.
        element: bytes of a number.
        training: whether there is a backward pass.
    """
    return max(1, math.ceil(element * flops / ((3 if training else 2) * bandwidth)))


def rows_while_travelling(pays: float, model_dim: int, weights: float) -> float:
    """Return how many rows take as long to compute as one row takes to travel there and back.

    Args:
        pays: result of :func:`break_even_rows`.
        model_dim: M, numbers of a row.
        weights: N, numbers of an expert.
    """
    return pays * 2 * model_dim / weights


def measured_break_even(
    groups: ExpertParallelGroups, dtype: torch.dtype, device: torch.device, *, training: bool
) -> int:
    """Return :func:`break_even_rows` of this machine. Collective on the first call for a dtype.

    The first call measures some products and exchanges, for milliseconds. All ranks get the same
    number, the largest of any rank.
    """
    key = ("break even", groups.ep_group, dtype, device.type)
    ratio = once_per_world(key, lambda: _flops_per_byte(groups, dtype, device))
    return break_even_rows(ratio, 1.0, dtype.itemsize, training=training)


@torch.no_grad()
def _flops_per_byte(groups, dtype, device):
    """Measure how many FLOP this machine computes while a byte travels, the most of any rank."""
    # not inference tensors, which a stream of another mode cannot fill
    num_rows, width, numbers = _SIZES_ON_GPU if device.type == "cuda" else _SIZES
    rows = torch.ones(num_rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, width, dtype=dtype, device=device)
    product = _fastest(lambda: rows @ weight, device)
    sent = torch.ones(numbers, dtype=dtype, device=device)
    received = torch.empty_like(sent)
    # half of the ranks send to the other half, as busy ranks do to their helpers
    to_P, from_P = _neighbour_splits(groups, numbers)
    message = received[: sum(from_P)], sent[: sum(to_P)], from_P, to_P
    exchange = _fastest(lambda: dist.all_to_all_single(*message, group=groups.ep_group), device)
    flops = 2 * num_rows * width**2 / product
    bytes_per_second = numbers * dtype.itemsize / exchange
    mine = round(1000 * flops / bytes_per_second)
    return max(ratio for (ratio,) in gather_integers([mine], groups.ep_group)) / 1000


def _neighbour_splits(groups, numbers):
    """Return the numbers to and from each rank if each rank 2i sends to rank 2i + 1."""
    to_P, from_P = [0] * groups.ep_size, [0] * groups.ep_size
    partner = groups.ep_rank ^ 1
    if partner < groups.ep_size:
        (from_P if groups.ep_rank % 2 else to_P)[partner] = numbers
    return to_P, from_P


def _fastest(work, device):
    """Return the seconds of the fastest of some calls."""
    return min(_seconds(work, device) for _ in range(_REPETITIONS))


def _seconds(work, device):
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.synchronize()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1000
