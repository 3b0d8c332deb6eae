"""When it pays that ranks help each other (``balance_ranks``): a formula for the time of an update.

With utilisation u (mean over largest load of ranks) the busiest rank has 1/u times the mean rows.
Products of experts and exchanges then take 1/u times their even time, unless helpers take what is
above the mean. Worst for helpers is one busy rank: each of the other P - 1 ranks takes an equal
part, and one link sends P - 1 experts there. The parts must pay for their moves::

    (1/u - 1) L / (P - 1)  >=  bytes * FLOP/s / (3 * bytes/s)        L: mean rows of a rank

(:mod:`fairseq_tutel.distributed.balance.break_even`). Moves are hidden behind the products of own
rows, once in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..distributed.balance import break_even_rows

if TYPE_CHECKING:
    from .planner import Plan

UTILISATIONS = (0.5, 0.62, 0.76, 0.88)


@dataclass(frozen=True)
class Help:
    """Update of a run with a busy rank, in seconds."""

    utilisation: float
    without: float
    helped: float  # ``without`` if moves do not pay
    rows: float  # that each helper takes

    @property
    def gain(self) -> float:
        """How many times faster an update is with help."""
        return self.without / self.helped


def gain_of_help(
    even: float, scaled: float, moves: float, utilisation: float
) -> tuple[float, float]:
    """Return the time without help and with it.

    >>> gain_of_help(even=10.0, scaled=6.0, moves=1.0, utilisation=0.5)
    (16.0, 11.0)

    Args:
        even: time with even loads.
        scaled: part of it that follows the rows of the busiest rank.
        moves: time of the moves that nothing hides.
        utilisation: mean over largest load, 0..1.
    """
    return even + scaled * (1 / utilisation - 1), even + moves


def rows_that_pay(plan: Plan) -> int:
    """Return how many rows of a helper pay for moving an expert, in training."""
    hardware, element = plan.hardware, plan.settings.precision.element
    return break_even_rows(hardware.product_rate(element), _bandwidth(plan), element, training=True)


def help_of(plan: Plan, utilisation: float) -> Help:
    """Predict an update in which one rank of an exchange group is busy.

    Args:
        plan: of a run without a capacity, with even loads.
        utilisation: mean over largest load of the ranks, 0..1.
    """
    settings, hardware, peers = plan.settings, plan.hardware, plan.traffic.exchange_ranks
    element = settings.precision.element
    again = bool(settings.model.checkpoint_activations)
    rows = plan.traffic.rows * (1 / utilisation - 1) / max(1, peers - 1)
    products = exposed = 0.0
    for stack in plan.parameters.stacks:
        forward = plan.traffic.rows * 2 * stack.products / hardware.product_rate(element)
        way = (peers - 1) * stack.expert * element / _bandwidth(plan) + hardware.latency
        layers = stack.moe_layers * settings.update_freq
        products += layers * (3 + again) * forward
        exposed += layers * ((1 + again) * max(0, way - forward) + max(0, way - 2 * forward))
    scaled = products + plan.exchange.exposed
    without, helped = gain_of_help(plan.time.total, scaled, exposed, utilisation)
    pays = rows >= rows_that_pay(plan) and helped < without
    return Help(utilisation, without, helped if pays else without, rows)


def _bandwidth(plan: Plan) -> float:
    """Return the bytes per second that a rank sends to the ranks that it exchanges rows with."""
    hardware = plan.hardware
    near = plan.traffic.exchange_ranks <= hardware.gpus_per_node
    links = hardware.node_bandwidth if near else hardware.network_bandwidth
    return links * hardware.link_efficiency
