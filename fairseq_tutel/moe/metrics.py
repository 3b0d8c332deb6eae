"""Metrics from the reports of layers: errors of wire formats, utilisation of the experts.

No function waits for the device. Utilisation is for all ranks together. Let c_e be the (token,
choice) pairs routed to expert e before dropping, r_w the rows that rank w receives, C the capacity,
E the experts and W the ranks, in one forward pass or summed over several::

    moe_util_slot = 100 * kept pairs / (E * C * W)     rows of the padded buffers that are in use
    moe_util_load = 100 * mean_e(c_e) / max_e(c_e)     1 / (1 + MaxVio), arXiv 2408.15664 eq. 4
    moe_util_rank = 100 * mean_w(r_w) / max_w(r_w)     what the time of a dropless step depends on
    moe_drop      = 100 * (1 - kept / routed pairs)
    moe_dead      = experts with c_e = 0

No router reaches 100. If choices are even but independent and K is much less than E, ``moe_drop``
at factor 1 is about 40% / sqrt(n) with n pairs per expert and rank.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..distributed import Direction, ExchangeRecord, ExpertParallelGroups, expert_parallelism
from .reports import MoEAux

# one name per direction: sum of the layers' errors, and number of layers with an error
WIRE_ERROR_NAMES = tuple(f"moe_wire_error_{direction.name.lower()}" for direction in Direction)
WIRE_LAYERS_NAMES = tuple(f"moe_wire_layers_{direction.name.lower()}" for direction in Direction)
HELP_NAMES = ("moe_util_rank_helped", "moe_rows_helped", "moe_mb_moved")
HELP_LAYERS_NAME = "moe_helped_layers"
UTILISATION_NAMES = ("moe_util_slot", "moe_util_load", "moe_util_rank", "moe_drop", "moe_dead")


@torch.no_grad()
def wire_errors(records: Iterable[ExchangeRecord]) -> dict[str, torch.Tensor]:
    """Return the relative errors (RMS) of rows that layers encoded in one forward pass.

    fp32 scalars: sums of the layers' errors under WIRE_ERROR_NAMES (of gradients after the backward
    pass), numbers of layers with an error under WIRE_LAYERS_NAMES; empty if nothing was encoded.
    """
    sums = [record.square_sums for record in records if record.square_sums]
    if not sums:
        return {}
    none = torch.zeros_like(next(iter(sums[0].values())))
    sums_LX2 = torch.stack([torch.stack([one.get(d, none) for d in Direction]) for one in sums])
    error_XL, square_XL = sums_LX2.permute(2, 1, 0)  # X: directions, L: layers
    known_XL = (square_XL > 0) & square_XL.isfinite()
    ratio_XL = (error_XL / square_XL).sqrt().masked_fill(~known_XL, 0)
    values = torch.cat([ratio_XL.sum(1), known_XL.sum(1, dtype=torch.float32)])
    return dict(zip(WIRE_ERROR_NAMES + WIRE_LAYERS_NAMES, values.unbind(), strict=True))


def help_counts(records: Iterable[ExchangeRecord]) -> dict[str, float]:
    """Return what the layers' ranks did for each other in one forward and backward pass.

    Sums over the layers under HELP_NAMES, and the number of layers under HELP_LAYERS_NAME; empty
    without ``balance_ranks``. Divided by that number, they are the utilisation of ranks with help
    (as ``moe_util_rank``), rows of this rank's experts that others computed, and megabytes sent.
    """
    helped = [record for record in records if record.loads_P]
    if not helped:
        return {}
    loads = [record.loads_P for record in helped]
    used = sum(100 * sum(load_P) / len(load_P) / max(1, *load_P) for load_P in loads)
    rows = sum(record.rows_helped for record in helped)
    sent = sum(record.bytes_moved for record in helped) / 1e6
    return dict(zip((*HELP_NAMES, HELP_LAYERS_NAME), (used, rows, sent, len(helped)), strict=True))


class RoutingCounts(NamedTuple):
    """Counts of the MoE layers of one forward pass; may be summed over ranks and passes."""

    load: torch.Tensor  # int [L, E], pairs routed to each expert, before dropping
    kept: torch.Tensor  # int [L, E], rows that each expert gets, after dropping
    received: torch.Tensor  # int [L, W], rows that each rank receives; each row goes to r ranks
    slots: torch.Tensor  # int [L], rows of the padded buffers, E * C for each rank; 0 if ragged


class Utilisation(NamedTuple):
    """Percentages, and the number of ``dead`` experts; see the module docstring."""

    slot: torch.Tensor
    load: torch.Tensor
    rank: torch.Tensor
    drop: torch.Tensor
    dead: torch.Tensor


@torch.no_grad()
def routing_counts(
    reports: Sequence[MoEAux], groups: ExpertParallelGroups, r: int = 1
) -> RoutingCounts:
    """Return this rank's counts for layers, with equally many experts, in one forward pass.

    ``groups`` is the placement of the experts, ``r`` the parallelism that the layers used.
    """
    load_LE = torch.stack([aux.num_routed_KE for aux in reports]).sum(1, dtype=torch.int32)
    kept_LE = torch.stack([aux.num_kept_per_expert_E for aux in reports])
    sent_LE = kept_LE
    if r != 1:
        parallelism = expert_parallelism(groups, r)
        sent_LE = kept_LE.repeat(1, parallelism.num_destinations)
        groups = parallelism.exchange_groups
    # only the ranks of this rank's exchange group receive its rows
    sent_LP = sent_LE.view(len(reports), groups.ep_size, -1).sum(2, dtype=torch.int32)
    first = groups.rank - groups.ep_rank
    after = groups.world_size - first - groups.ep_size
    return RoutingCounts(
        load=load_LE,
        kept=kept_LE,
        received=pad(sent_LP, (first, after)),
        slots=torch.stack([kept_LE.new_full((), aux.num_slots) for aux in reports]),
    )


@torch.no_grad()
def utilisation(counts: RoutingCounts) -> Utilisation:
    """Return the utilisation from counts that are summed over ranks, fp64 [..., L].

    ``slot`` is 0 if no rows were padded. A pass without pairs is 0 everywhere.
    """
    load, kept, received, slots = (count.double() for count in counts)
    num_kept, num_routed = kept.sum(-1), load.sum(-1)
    return Utilisation(
        slot=100 * torch.where(slots > 0, num_kept / slots.clamp(min=1), 0.0),
        load=100 * load.mean(-1) / load.amax(-1).clamp(min=1),
        rank=100 * received.mean(-1) / received.amax(-1).clamp(min=1),
        drop=100 * (num_routed - num_kept) / num_routed.clamp(min=1),
        dead=(load == 0).sum(-1).double(),
    )
