"""When it pays that ranks help each other (``balance_ranks``): a formula for the time of an update.

Every term is a count of a step's plan times a measured speed::

    products    rows of the busiest rank
    exchanges   rows over the busiest link
    moves       experts that one rank sends or gets, less what its own rows hide

The plan is the one of the layer itself (:func:`fairseq_tutel.distributed.balance.plan_step`). It
has no moves if moves do not pay. The planner counts one busy rank, the worst case for helpers: each
of the other ranks takes an equal part, and one link sends an expert to each of them.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..distributed.balance import BalancePlan, break_even_rows, plan_step, rows_while_travelling

if TYPE_CHECKING:
    from .parameters import StackParameters
    from .planner import Plan

UTILISATIONS = (0.5, 0.62, 0.76, 0.88)


@dataclass(frozen=True)
class LayerSpeeds:
    """Seconds of one layer's parts.

    On a duplex link ``both_ways`` equals ``one_way``. If both directions share the link's speed, it
    is twice ``one_way``.
    """

    row: float  # experts' products of one row in a forward pass, half of those in a backward pass
    row_alone: float  # the same while the other ranks wait; less if ranks share a processor
    one_way: float  # all exchanges of one row in a step if its link sends one way
    both_ways: float  # the same if the link sends as many rows the other way
    move: float  # one way of an expert's weights
    forwards: int = 1  # forward passes of a step; 2 with activation checkpointing

    def seconds(self, plan: BalancePlan) -> float:
        """Return the time of a step's products, exchanges and visible moves."""
        *others, busiest = sorted(plan.load_P)
        together = sum(others) / len(others)
        products = together * self.row + (busiest - together) * self.row_alone
        links = [
            max(max(rows) * self.one_way, sum(rows) / 2 * self.both_ways)
            for rows in plan.links_P2.tolist()
        ]
        return (self.forwards + 2) * products + max(links) + self._moves(plan)

    def _moves(self, plan):
        """Return how long helpers and homes wait for weights and gradients."""
        if not plan.moves:
            return 0.0
        ends = [collections.Counter(move[end] for move in plan.moves) for end in (1, 2)]
        way = self.move * max(max(count.values()) for count in ends)
        own = self.row * min(plan.own_rows_P[rank] for rank in ends[1])
        return self.forwards * max(0.0, way - own) + max(0.0, way - 2 * own)


def one_busy_rank(rows: int, ranks: int, local: int, utilisation: float) -> torch.Tensor:
    """Count rows of which rank 0 gets ``1 / utilisation`` times the mean, int64 [P, E].

    Each of the P ranks has ``rows`` rows, which its ``local`` experts share evenly.
    """
    busy = round(rows / ranks / utilisation)
    shares = [(busy, local), (rows - busy, local * (ranks - 1))]
    count_E = [total * (j + 1) // n - total * j // n for total, n in shares for j in range(n)]
    return torch.tensor(count_E).expand(ranks, -1)


@dataclass(frozen=True)
class Help:
    """Update of a run with a busy rank, in seconds."""

    without: float
    helped: float  # ``without`` if moves do not pay

    @property
    def gain(self) -> float:
        """How many times faster an update is with help."""
        return self.without / self.helped


def rows_that_pay(plan: Plan) -> int:
    """Return how many rows of a helper pay for moving an expert, in training."""
    hardware, element = plan.hardware, plan.settings.precision.element
    return break_even_rows(hardware.product_rate(element), _bandwidth(plan), element, training=True)


def help_of(plan: Plan, utilisation: float) -> Help:
    """Predict an update in which one rank of an exchange group is busy.

    The plan is that of a run without a capacity, with even loads. ``utilisation`` is the mean over
    the largest load of the ranks, 0..1.
    """
    without = helped = plan.time.total
    sizes = plan.traffic.rows, plan.traffic.exchange_ranks, plan.parameters.local_experts
    even, busy = (one_busy_rank(*sizes, u) for u in (1.0, utilisation))
    tolerance, pays = plan.settings.exchange.balance_tolerance, rows_that_pay(plan)
    for stack, about in zip(plan.parameters.stacks, plan.settings.stacks, strict=True):
        if not stack.moe_layers:
            continue
        speeds = _speeds(plan, stack, even)
        travel = rows_while_travelling(pays, about.dim, stack.expert)
        plans = (
            BalancePlan(even),
            BalancePlan(busy),
            plan_step(busy, tolerance=tolerance, min_rows=pays, travel=travel),
        )
        at_best, alone, together = map(speeds.seconds, plans)
        layers = stack.moe_layers * plan.settings.update_freq
        without += layers * (alone - at_best)
        helped += layers * (together - at_best)
    return Help(without, helped)


def _speeds(plan: Plan, stack: StackParameters, even: torch.Tensor) -> LayerSpeeds:
    """Return the speeds of a stack's layers on the plan's hardware, whose links are duplex."""
    element, hardware = plan.settings.precision.element, plan.hardware
    layers = plan.parameters.moe_layers * plan.settings.update_freq
    exchanged = plan.exchange.exposed / layers / int(BalancePlan(even).links_P2.max())
    row = 2 * stack.products / hardware.product_rate(element)
    return LayerSpeeds(
        row=row,
        row_alone=row,
        one_way=exchanged,
        both_ways=exchanged,
        move=stack.expert * element / _bandwidth(plan),
        forwards=2 if plan.settings.model.checkpoint_activations else 1,
    )


def _bandwidth(plan: Plan) -> float:
    """Return the bytes per second that a rank sends to the ranks that it exchanges rows with."""
    hardware = plan.hardware
    near = plan.traffic.exchange_ranks <= hardware.gpus_per_node
    links = hardware.node_bandwidth if near else hardware.network_bandwidth
    return links * hardware.link_efficiency
