"""The time of one update on some hardware.

The model is plain arithmetic: every part runs at a fixed share of its peak, one after the other.
What it leaves out: overlap of the gradients' all-reduce (faster), waiting for the slowest rank,
uneven experts, data loading (slower). Its figures are predictions, not measurements.

Only exchanges may overlap, with the experts of their layer. With overlap degree d the rows of a
layer travel in d chunks (arXiv 2206.03382, section 3.2)::

    link      > D0 > D1 > D2 > D3      > C0 > C1 > C2 > C3
    products        F0   F1   F2   F3

All dispatches are queued at once; a chunk's products start when it is there and the chunk before is
done, its way back when its products are done and the link is free. The backward pass runs the same
way with the gradients, and weight gradients, which no exchange waits for, fill the end. A chunk
costs as an exchange of its size: d chunks send d times the messages and start d times. What travels
in another number format is read and written once more at either end.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from ..config import EXCHANGES
from ..distributed.exchanges import Direction, LinearExchange
from ..moe.wire import row_bytes
from .hardware import Hardware
from .memory import Memory, stepped_parameters
from .parameters import Parameters, StackParameters
from .settings import Settings
from .work import Traffic, Work


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of all exchanges of one update."""

    exposed: float = 0.0  # that the layers wait for the links
    carried: float = 0.0  # that the links are busy, hidden or not
    casts: float = 0.0  # that rows take into the numbers of the wire, and out of them

    @property
    def hidden(self) -> float:
        """Share of the links' time that the layers do not wait for, 0..1."""
        return 1 - self.exposed / self.carried if self.carried else 0.0


def exposed(
    there: float, products: float, back: float, degree: int, meanwhile: float = 0.0
) -> float:
    """Seconds that a layer waits for its two exchanges in ``degree`` chunks; one hides nothing.

    ``there``, ``back``: of one chunk on the link; ``products``: of one chunk's experts;
    ``meanwhile``: of work that follows the products and waits for no exchange.
    """
    if degree == 1:
        return there + back
    link, done = degree * there, 0.0
    for chunk in range(1, degree + 1):
        done = max(done, chunk * there) + products
        link = max(link, done) + back
    return max(link, done + meanwhile) - degree * products - meanwhile


def exchange_time(
    settings: Settings, parameters: Parameters, traffic: Traffic, work: Work, hardware: Hardware
) -> ExchangeTime:
    """Exchanges of one update with the algorithm, degree and wire of the settings. Raises
    NotImplementedError if the algorithm does not predict its time.
    """
    if not work.exchanges:
        return ExchangeTime()
    parts = [
        _exchange_time(settings, stack.dim, counted, traffic, work.exchange_peers, hardware)
        for stack, counted in zip(settings.stacks, parameters.stacks, strict=True)
        if counted.moe_layers
    ]
    columns = zip(*map(dataclasses.astuple, parts), strict=True)
    return ExchangeTime(*map(sum, columns))


def _exchange_time(
    settings: Settings,
    dim: int,
    counted: StackParameters,
    traffic: Traffic,
    peers: int,
    hardware: Hardware,
) -> ExchangeTime:
    """Of the layers of one stack."""
    model, choice, b = settings.model, settings.exchange, settings.precision.element
    degree = choice.overlap_degree
    products = traffic.rows * 2 * counted.products / hardware.product_rate(b) / degree
    directions = (Direction.DISPATCH, Direction.COMBINE, Direction.DISPATCH_GRADIENT)
    dtype = torch.float16 if b == 2 else torch.float32
    widths = [row_bytes(choice, dim, dtype, direction) for direction in directions]
    predict, sent = EXCHANGES.get(choice.algorithm).predict, traffic.sent
    there, back, gradient = (predict(sent * width / degree, peers, hardware) for width in widths)
    # written and read at both ends
    casts = [2 * sent * (dim * b + w) / hardware.stream if w < dim * b else 0.0 for w in widths]
    forward = exposed(there, products, back, degree)
    # of the two products of the backward pass an exchange waits for the rows' gradients only
    backward = exposed(gradient, products, gradient, degree, meanwhile=degree * products)
    layers = counted.moe_layers * settings.update_freq
    passes = 2 if model.checkpoint_activations else 1  # forward passes, with recomputation
    return ExchangeTime(
        exposed=layers * (passes * forward + backward),
        carried=layers * degree * (passes * (there + back) + 2 * gradient),
        casts=layers * (passes * (casts[0] + casts[1]) + 2 * casts[2]),
    )


def ring_time(size: float, ranks: int, near: int, hardware: Hardware) -> float:
    """Seconds of an all-gather or reduce-scatter, ``size`` bytes in all; an all-reduce is one after
    the other.

    ``near`` of the ranks share a node, if there are as many. Between nodes rings use the network
    ports of all of these at once.
    """
    if ranks < 2 or not size:
        return 0.0
    bandwidth = hardware.node_bandwidth
    if ranks > near:
        bandwidth = min(bandwidth, hardware.network_bandwidth * near)
    carried = size * (ranks - 1) / ranks / (bandwidth * hardware.link_efficiency)
    return carried + hardware.latency * math.log2(ranks)


def gather_time(size: float, traffic: Traffic, hardware: Hardware) -> float:
    """Seconds in which one layer's weights are gathered, ``size`` bytes."""
    near = hardware.neighbours(traffic.gather_stride)
    return ring_time(size, traffic.gather_ranks, near, hardware)


def scatter_time(size: float, traffic: Traffic, hardware: Hardware) -> float:
    """Seconds in which the gradients of what was gathered go back, ``size`` bytes.

    As an all-to-all, after which each GPU adds up its part in fp32: between nodes a ring would add
    on its way and send fewer bytes, but round each time.
    """
    near = hardware.neighbours(traffic.gather_stride)
    links = dataclasses.replace(hardware, gpus_per_node=near)
    return LinearExchange.predict(size, traffic.gather_ranks, links)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update, by part."""

    matmul: float  # matrix products
    elementwise: float  # everything else that passes over activations and logits
    optimizer: float  # the update of the weights
    all_to_all: float  # that MoE layers wait for their exchanges, casts for the wire included
    weights: float  # gathers of experts' weights, and their gradients' way back, of r-flow
    all_reduce: float  # gradients of dense and of replicated parameters
    broadcast: float  # dense parameters, from the GPUs that have their statistics

    @property
    def total(self) -> float:
        """Seconds of an update."""
        return sum(dataclasses.astuple(self))


def step_time(
    settings: Settings,
    parameters: Parameters,
    traffic: Traffic,
    memory: Memory,
    work: Work,
    exchange: ExchangeTime,
    hardware: Hardware,
) -> StepTime:
    """Time of one update.

    Elementwise kernels are taken to write what the backward pass keeps, read it, read it again
    there and write a gradient of its size (4 passes, 2 more for recomputation), and the optimizer
    to be a fused kernel that moves each value it needs once.
    """
    b, again = settings.precision.element, bool(settings.model.checkpoint_activations)
    kept = memory.without_checkpointing * (6 if again else 4) + 2 * memory.logits
    # each layer's weights in every forward pass (again in a recomputation), gradients once
    gathers = 0.0
    for numbers, counted in zip(traffic.gathered, parameters.stacks, strict=True):
        there = (1 + again) * gather_time(numbers * b, traffic, hardware)
        back = scatter_time(numbers * b, traffic, hardware)
        gathers += counted.moe_layers * (there + back)
    # replicas of an expert are P GPUs apart
    near = hardware.neighbours(settings.exchange_peers)
    reduced = ring_time(work.reduce_bytes, settings.gpus, hardware.gpus_per_node, hardware)
    reduced += ring_time(work.replica_bytes, work.replicas, near, hardware)
    everywhere, stepped = _optimizer_bytes(settings)
    moved = parameters.per_gpu * everywhere + stepped_parameters(settings, parameters) * stepped
    # after the step, of fp32 copies where there are any, each by the ring of its owner
    shared = parameters.dense * (4 if settings.precision.master_copies else b)
    broadcast = ring_time(shared, settings.gpus, hardware.gpus_per_node, hardware)
    return StepTime(
        matmul=work.tokens * work.hardware_flops / hardware.product_rate(b),
        elementwise=settings.update_freq * kept / hardware.stream,
        optimizer=moved / hardware.stream,
        all_to_all=exchange.exposed + exchange.casts,
        weights=settings.update_freq * gathers,
        all_reduce=2 * reduced,
        broadcast=broadcast if settings.zero_sharding else 0.0,
    )


def _optimizer_bytes(settings: Settings) -> tuple[int, int]:
    """Bytes moved per parameter: by the norm of the gradient and fp32 copies, of all parameters;
    by the maximum of the statistics and the update, of those that this GPU steps.
    """
    precision = settings.precision
    b, statistics = precision.element, 2 * precision.statistic
    master = 4 + 4 + 4 + b if precision.master_copies else 0  # copies written and read again
    update = 2 * b + b + 2 * statistics
    maximum = b + statistics if precision.statistic == 2 else 0
    return b + master, maximum + update
