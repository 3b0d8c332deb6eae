"""The exchange, the placement of experts and r that make an update shortest, on paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..config import EXPERT_PLACEMENTS
from .exchange import exchange_time
from .parameters import count_parameters, possible_flows
from .planner import Plan, make_plan
from .settings import Settings

DEGREES = (1, 2, 4, 8)
# what a plan chooses from: their results are the same to the bit
ALGORITHMS = ("linear", "2dh")
# a prediction is not worth a more complicated run that it says gains less
_MARGIN = 0.01


def exchanges(settings: Settings) -> Iterator[Settings]:
    """The same run with every algorithm and degree, the simplest first."""
    for algorithm, degree in itertools.product(ALGORITHMS, DEGREES):
        yield settings.replace(model={"moe_a2a": algorithm, "moe_overlap_degree": degree})


def with_best_exchange(plan: Plan) -> Plan:
    """The same run with the algorithm and degree that leave the least time exposed.

    The simplest of equals.
    """
    known = plan.parameters, plan.work, plan.hardware
    found = [(exchange_time(s, *known).exposed, s) for s in exchanges(plan.settings)]
    least = min(exposed for exposed, _ in found)
    chosen = next(s for exposed, s in found if exposed <= least * (1 + 1e-9))
    return make_plan(chosen, plan.hardware, plan.parameters)


def best_plan(plan: Plan) -> Plan:
    """The same run with the placement, r, algorithm and degree of the shortest update.

    Of what fits, if anything does; the simplest of those within a hundredth of the shortest. Wire
    formats, which change what is computed, stay as they are.
    """
    found = [plan_ for flow in _flows(plan) for plan_ in _with_exchanges(flow)]
    found = [other for other in found if other.fits] or found
    least = min(other.time.total for other in found)
    return next(other for other in found if other.time.total <= least * (1 + _MARGIN))


def _flows(plan: Plan) -> Iterator[Plan]:
    """Every placement with every r that it can have, the simplest first."""
    settings = plan.settings
    if not settings.routing or settings.gpus == 1 or settings.is_dense_formulation:
        yield plan
        return
    shared = settings.gpus > settings.routing.num_experts
    for placement in EXPERT_PLACEMENTS if shared else EXPERT_PLACEMENTS[:1]:
        placed = settings.with_flow(placement)
        try:
            parameters = count_parameters(placed)
        except ValueError:  # hidden units that do not divide, or groups that hold whole experts
            continue
        for r in possible_flows(placed):
            yield make_plan(placed.with_flow(r=r), plan.hardware, parameters)


def _with_exchanges(plan: Plan) -> Iterator[Plan]:
    for settings in exchanges(plan.settings):
        yield make_plan(settings, plan.hardware, plan.parameters)
        if not plan.work.exchanges:
            return  # nothing to choose
