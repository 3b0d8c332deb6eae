"""Time of one update on some hardware.

Every part runs at a fixed share of its peak, one after the other. The prediction leaves out overlap
of the gradients' all-reduce (faster), and the slowest rank, uneven experts and data loading
(slower).

Exchanges overlap with the experts of their layer only. With overlap degree d the rows of a layer
travel in d chunks (arXiv 2206.03382, section 3.2)::

    link      > D0 > D1 > D2 > D3      > C0 > C1 > C2 > C3
    products        F0   F1   F2   F3

All dispatches are queued at once. The products of a chunk start when the chunk has arrived and the
previous chunk is done. The combine of a chunk starts when its products are done and the link is
free. The backward pass does the same with the gradients; weight gradients come last, because no
exchange waits for them. A chunk costs as much as an exchange of its size, so d chunks send d times
the messages. A wire format costs one more pass over the rows at either end.
"""

import math
from dataclasses import astuple, dataclass, replace

import torch

from ..config import EXCHANGES
from ..distributed.exchanges import Direction, LinearExchange
from ..moe.wire import row_bytes
from .gpu_memory import Memory, stepped_parameters
from .hardware import Hardware
from .parameters import Parameters
from .settings import Settings
from .work import Traffic, Work


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of all exchanges of one update."""

    exposed: float = 0.0  # layers wait for the links
    carried: float = 0.0  # links are busy, hidden or not
    casts: float = 0.0  # casts to the wire format and back

    @property
    def hidden(self) -> float:
        """Share of the links' time that the layers do not wait for, 0..1."""
        return 1 - self.exposed / self.carried if self.carried else 0.0


def exposed(
    there: float, products: float, back: float, degree: int, meanwhile: float = 0.0
) -> float:
    """Return seconds that a layer waits for its two exchanges.

    Args:
        there, back: seconds of one chunk on the link.
        products: seconds of one chunk's experts.
        degree: number of chunks; 1 hides nothing.
        meanwhile: seconds of work that follows the products and waits for no exchange.
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
    """Predict the exchanges of one update with the algorithm, degree and wire of the settings.

    Raises:
        NotImplementedError: the algorithm does not predict its time.
    """
    if not work.exchanges:
        return ExchangeTime()
    choice, b, sent = settings.exchange, settings.precision.element, traffic.sent
    degree, predict = choice.overlap_degree, EXCHANGES.get(choice.algorithm).predict
    directions = (Direction.DISPATCH, Direction.COMBINE, Direction.DISPATCH_GRADIENT)
    dtype = torch.float16 if b == 2 else torch.float32
    passes = 2 if settings.model.checkpoint_activations else 1  # forward ones, with recomputation
    waiting = carried = casting = 0.0
    for stack, counted in zip(settings.stacks, parameters.stacks, strict=True):
        layers = counted.moe_layers * settings.update_freq
        products = traffic.rows * 2 * counted.products / hardware.product_rate(b) / degree
        widths = [row_bytes(choice, stack.dim, dtype, direction) for direction in directions]
        there, back, gradient = (
            predict(sent * width / degree, work.exchange_peers, hardware) for width in widths
        )
        row = stack.dim * b
        # written and read at both ends
        casts = [2 * sent * (row + w) / hardware.stream if w < row else 0.0 for w in widths]
        forward = exposed(there, products, back, degree)
        # an exchange of the backward pass waits for the gradients of rows, not of weights
        backward = exposed(gradient, products, gradient, degree, meanwhile=degree * products)
        waiting += layers * (passes * forward + backward)
        carried += layers * degree * (passes * (there + back) + 2 * gradient)
        casting += layers * (passes * (casts[0] + casts[1]) + 2 * casts[2])
    return ExchangeTime(waiting, carried, casting)


def ring_time(size: float, ranks: int, near: int, hardware: Hardware) -> float:
    """Return seconds of an all-gather or reduce-scatter by a ring; an all-reduce is both in turn.

    ``size`` are the bytes of all ranks together; ``near`` ranks can share a node. Between nodes,
    rings use the network ports of all their ranks in a node at once.
    """
    if ranks < 2 or not size:
        return 0.0
    bandwidth = hardware.node_bandwidth
    if ranks > near:
        bandwidth = min(bandwidth, hardware.network_bandwidth * near)
    carried = size * (ranks - 1) / ranks / (bandwidth * hardware.link_efficiency)
    return carried + hardware.latency * math.log2(ranks)


def gather_time(size: float, traffic: Traffic, hardware: Hardware) -> float:
    """Return seconds of the all-gather of one layer's weights, ``size`` bytes."""
    near = hardware.neighbours(traffic.gather_stride)
    return ring_time(size, traffic.gather_ranks, near, hardware)


def scatter_time(size: float, traffic: Traffic, hardware: Hardware) -> float:
    """Return seconds of the way back of the gradients of gathered weights, ``size`` bytes.

    It is an all-to-all, after which each GPU sums its part in fp32. A ring would send fewer bytes
    between nodes, but round at each step.
    """
    near = hardware.neighbours(traffic.gather_stride)
    return LinearExchange.predict(size, traffic.gather_ranks, replace(hardware, gpus_per_node=near))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update, by part."""

    matmul: float  # matrix products
    elementwise: float  # other kernels over activations and logits
    optimizer: float  # the update of the weights
    all_to_all: float  # waiting for exchanges, and casts to the wire format
    weights: float  # gathers of experts' weights, and the way back of their gradients
    all_reduce: float  # gradients of dense and of replicated parameters
    broadcast: float  # dense parameters, from the GPUs that hold their statistics

    @property
    def total(self) -> float:
        """Seconds of an update."""
        return sum(astuple(self))


def step_time(
    settings: Settings,
    parameters: Parameters,
    traffic: Traffic,
    memory: Memory,
    work: Work,
    exchange: ExchangeTime,
    hardware: Hardware,
) -> StepTime:
    """Predict the time of one update.

    Elementwise kernels write what the backward pass keeps, read it, read it again there and write a
    gradient of its size: 4 passes, 2 more for what is computed again. The optimizer is a fused
    kernel that moves each value once.
    """
    b, again = settings.precision.element, bool(settings.model.checkpoint_activations)
    values = memory.without_checkpointing + memory.again
    kept = values * (6 if again else 4) + 2 * memory.again + 2 * memory.logits
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
    # after the step each owner broadcasts its parameters by a ring, as fp32 copies if there are any
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
    """Return bytes moved per parameter, for all parameters and for those that this GPU steps.

    The first are moved by the gradient norm and the fp32 copies, the second by the maximum of the
    statistics and by the update.
    """
    precision = settings.precision
    b, statistics = precision.element, 2 * precision.statistic
    master = 4 + 4 + 4 + b if precision.master_copies else 0  # copies written and read again
    update = 2 * b + b + 2 * statistics
    maximum = b + statistics if precision.statistic == 2 else 0
    return b + master, maximum + update
