"""Utilisation of the experts, of all ranks together: what was kept, what was dropped, who had most.

A rank counts its own tokens; sums of counts over ranks say what no rank's percentages can. With c_e
the (token, choice) pairs routed to expert e before dropping, r_w the rows that rank w receives,
C the capacity, E experts and W ranks, all of one forward pass (or summed over several)::

    moe_util_slot = 100 * kept pairs / (E * C * W)     rows of the padded buffers that are in use
    moe_util_load = 100 * mean_e(c_e) / max_e(c_e)     1 / (1 + MaxVio), arXiv 2408.15664 eq. 4
    moe_util_rank = 100 * mean_w(r_w) / max_w(r_w)     what the time of a dropless step depends on
    moe_drop      = 100 * (1 - kept / routed pairs)
    moe_dead      = experts with c_e = 0

No router that is as good as can be reaches 100: tokens choose one by one, so counts scatter.
:func:`independent_utilisation` is what an even but independent choice gives, the floor below which
drops do not fall (for K much less than E the noise is Poisson's: with n pairs per expert and rank,
``moe_drop`` at capacity factor 1 is about 40% / sqrt(n)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..distributed import ExpertParallelGroups, make_flow
from .metrics import MoEAux


class RoutingCounts(NamedTuple):
    """Counts of the MoE layers of one forward pass; sums over ranks (or passes) are such counts.

    Attributes:
        load: int [L, E], pairs routed to each expert, before dropping.
        kept: int [L, E], rows that each expert gets, after dropping.
        received: int [L, W], rows that each rank receives, its own included; with r > 1 each goes
            to r ranks.
        slots: int [L], rows of the padded buffers, E * C of a rank; 0 where rows are ragged.
    """

    load: torch.Tensor
    kept: torch.Tensor
    received: torch.Tensor
    slots: torch.Tensor


class Utilisation(NamedTuple):
    """See the module docstring; percentages, ``dead`` is a number of experts."""

    slot: torch.Tensor
    load: torch.Tensor
    rank: torch.Tensor
    drop: torch.Tensor
    dead: torch.Tensor


UTILISATION_NAMES = (
    "moe_util_slot",
    "moe_util_load",
    "moe_util_rank",
    "moe_drop",
    "moe_dead",
)


@torch.no_grad()
def routing_counts(
    reports: Sequence[MoEAux], groups: ExpertParallelGroups, r: int = 1
) -> RoutingCounts:
    """This rank's counts of the layers of one forward pass; nothing is read back to the host.

    Args:
        reports: of layers with as many experts each.
        groups: placement of the experts.
        r: of the exchange that the layers used, which says where rows went.
    """
    load_LE = torch.stack([aux.num_routed_KE for aux in reports]).sum(1, dtype=torch.int32)
    kept_LE = torch.stack([aux.num_kept_per_expert_E for aux in reports])
    sent_LE = kept_LE
    if r != 1:
        flow = make_flow(groups, r)
        sent_LE, groups = kept_LE.repeat(1, flow.copies), flow.exchange_groups
    # to the ranks of this rank's exchange group only, of which there may be several
    sent_LW = sent_LE.view(len(reports), groups.ep_size, -1).sum(2, dtype=torch.int32)
    first = groups.rank - groups.ep_rank
    after = groups.world_size - first - groups.ep_size
    return RoutingCounts(
        load=load_LE,
        kept=kept_LE,
        received=torch.nn.functional.pad(sent_LW, (first, after)),
        slots=torch.stack([kept_LE.new_full((), aux.num_slots) for aux in reports]),
    )


@torch.no_grad()
def utilisation(counts: RoutingCounts) -> Utilisation:
    """Utilisation from counts of all ranks, shapes [..., L], fp64.

    ``slot`` is 0 where no rows were padded; a pass without pairs is 0 everywhere.
    """
    load, kept, received, slots = (count.double() for count in counts)
    num_kept = kept.sum(-1)
    num_routed = load.sum(-1)
    return Utilisation(
        slot=100 * torch.where(slots > 0, num_kept / slots.clamp(min=1), 0.0),
        load=100 * load.mean(-1) / load.amax(-1).clamp(min=1),
        rank=100 * received.mean(-1) / received.amax(-1).clamp(min=1),
        drop=100 * (num_routed - num_kept) / num_routed.clamp(min=1),
        dead=(load == 0).sum(-1).double(),
    )


def independent_utilisation(
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    num_ranks: int = 1,
    capacity: int | None = None,
) -> Utilisation:
    """Expected utilisation where every token chooses any K of the E experts, evenly and alone.

    The pairs of an expert then are Binomial(T, K/E); experts (and ranks) are taken as independent
    of each other, which overstates the largest of few experts a little.

    Args:
        num_tokens: T of one rank.
        num_experts, top_k: E, K.
        num_ranks: W, of one exchange group, each with T tokens.
        capacity: C, rows per expert and rank; None: ``slot`` and ``drop`` are 0.
    """
    share = top_k / num_experts
    mean = num_tokens * share
    slot = drop = 0.0
    if capacity is not None:
        pmf_N = _binomial(num_tokens, share)
        rows_N = torch.arange(num_tokens + 1, dtype=torch.float64)
        kept = (pmf_N * rows_N.clamp(max=capacity)).sum().item()
        slot, drop = 100 * kept / capacity, 100 * (1 - kept / mean) if mean else 0.0
    unused = (1 - share) ** (num_tokens * num_ranks)
    of_ranks = max(num_ranks // max(1, num_ranks // num_experts), 1)
    values = (
        slot,
        100 * _mean_over_largest(num_tokens * num_ranks, share, num_experts),
        100 * _mean_over_largest(num_tokens * num_ranks * top_k, 1 / of_ranks, of_ranks),
        drop,
        num_experts * unused,
    )
    return Utilisation(*(torch.tensor(value, dtype=torch.float64) for value in values))


def _binomial(trials: int, share: float) -> torch.Tensor:
    """Probabilities of 0..trials successes, fp64."""
    k = torch.arange(trials + 1, dtype=torch.float64)
    n, p = torch.tensor(float(trials), dtype=torch.float64), torch.tensor(share).double()
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + torch.xlogy(k, p) + torch.xlogy(n - k, 1 - p)).exp()


def _mean_over_largest(trials: int, share: float, count: int) -> float:
    """Mean of Binomial(trials, share) over the expected largest of ``count`` such numbers."""
    if trials == 0 or share >= 1:
        return 1.0
    below_N = _binomial(trials, share).cumsum(0).clamp(max=1)
    largest = (1 - below_N**count).sum().item()  # sum over n of P(largest > n)
    return trials * share / largest
