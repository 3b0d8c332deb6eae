"""r-flow: which GPUs tokens travel to, and which weights travel to the tokens.

With fewer experts than GPUs, S = W/E GPUs hold each expert: whole (``replicated``) or a slice of
its hidden units each (``sliced``). Of the slices, r get a token (arXiv 2206.03382, section 3.1),
and each of those r GPUs gathers what it lacks of an r-th of the weights. Per GPU and layer, L bytes
of rows, P numbers of an expert, b bytes each:

    placement, r           exchange with  rows sent  weights gathered from  bytes gathered
    replicated, r = 1      E              L          none                   0
    replicated, r = 0      none           0          E                      b E P
    sliced, 1 <= r <= S    rE             rL         S/r, rE GPUs apart     bP / r (r = S: 0)
    sliced, r = 0          none           0          all                    b E P

E >= W is as replicated, with W in place of the E GPUs, as are expert groups, with their P. A GPU
that has all experts gathers nothing. As many bytes of gradients go back. Experts compute the same
number of products for any r: r times the rows through an r-th of the hidden units.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ..distributed.exchanges import LinearExchange
from .hardware import Hardware
from .parameters import Parameters
from .settings import Settings


@dataclass(frozen=True)
class Flow:
    """Where tokens and weights of one layer travel.

    Attributes:
        r: slices of an expert that get each of its tokens; 0: tokens stay.
        exchange_ranks: GPUs that exchange rows, 1 if none.
        copies: of each row, which the layer keeps, sent or not.
        gather_ranks: GPUs that share the weights which each of them gathers, 1 if none.
        gather_stride: distance between neighbours among those.
        gathered: numbers that a GPU holds after a gather, its own among them; 0 without one.
    """

    r: int
    exchange_ranks: int
    copies: int
    gather_ranks: int
    gather_stride: int
    gathered: int


def make_flow(settings: Settings, parameters: Parameters) -> Flow:
    """The flow of a run with experts."""
    r, slices, near = settings.exchange.r, parameters.slices, settings.exchange_peers
    if r == 0:
        holders = near if slices == 1 else settings.gpus
        whole = parameters.experts * parameters.expert
        return Flow(r, 1, 1, holders, 1, whole if holders > 1 else 0)
    if slices == 1 or r == slices:
        return Flow(r, r * near, r, 1, 1, 0)
    share = parameters.sliceable * parameters.local_experts // r
    return Flow(r, r * near, r, slices // r, r * near, share)


def gather_time(flow: Flow, element: int, hardware: Hardware) -> float:
    """Seconds in which one layer's weights are gathered."""
    return ring_time(flow.gathered * element, flow.gather_ranks, _near(flow, hardware), hardware)


def scatter_time(flow: Flow, element: int, hardware: Hardware) -> float:
    """Seconds in which the gradients of what was gathered go back.

    As an all-to-all, after which each GPU adds up its part in fp32: between nodes a ring would add
    on its way and send fewer bytes, but round each time.
    """
    links = dataclasses.replace(hardware, gpus_per_node=_near(flow, hardware))
    return LinearExchange.predict(flow.gathered * element, flow.gather_ranks, links)


def _near(flow: Flow, hardware: Hardware) -> int:
    """GPUs of a node that share weights."""
    return max(1, hardware.gpus_per_node // flow.gather_stride)


def ring_time(size: float, ranks: int, near: int, hardware: Hardware) -> float:
    """Seconds of an all-gather or reduce-scatter; an all-reduce is one after the other.

    Args:
        size: bytes of the whole.
        ranks: GPUs that take part.
        near: of them that share a node, if there are as many. Between nodes rings use the network
            ports of all of these at once.
    """
    if ranks < 2 or not size:
        return 0.0
    bandwidth = hardware.node_bandwidth
    if ranks > near:
        bandwidth = min(bandwidth, hardware.network_bandwidth * near)
    carried = size * (ranks - 1) / ranks / (bandwidth * hardware.link_efficiency)
    return carried + hardware.latency * math.log2(ranks)
