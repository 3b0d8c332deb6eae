"""Agreement between ranks before they exchange data of a size that depends on it.

One small all-gather per forward pass of the model (not per layer) tells every rank how many tokens
the others bring, and compares what must be equal. Ranks that disagree get an error with every
rank's values at once, where mismatched all-to-alls would hang until the process group's timeout (30
minutes by default).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .gather import gather_integers, refuse_differences
from .groups import ExpertParallelGroups, process_world


@dataclass(frozen=True)
class StepAgreement:
    """What the ranks of an exchange group agreed on for one forward pass.

    Attributes:
        num_tokens: the largest token count of any rank; capacities are computed from it, so that
            they are the same everywhere.
        agreed: the settings that were compared, by name; None in an agreement made by hand, which
            is taken on trust.
    """

    num_tokens: int
    agreed: Mapping[str, int] | None = None


def agree_step(
    num_tokens: int, must_equal: Mapping[str, int], groups: ExpertParallelGroups
) -> StepAgreement:
    """Exchange token counts and compare settings with the other ranks of the exchange group.

    NOTE: this reads a few integers back to the host, one synchronisation per forward pass.

    Args:
        num_tokens: tokens of this rank, 0 included.
        must_equal: name -> integer that has to be the same on all ranks.

    Raises:
        ValueError: some value differs; the message lists the ranks by value.
    """
    if not groups.communicates:
        return StepAgreement(num_tokens, must_equal)
    table = gather_integers([num_tokens, *must_equal.values()], groups.ep_group)
    for column, name in enumerate(must_equal, start=1):
        refuse_differences(name, [row[column] for row in table], groups.rank - groups.ep_rank)
    return StepAgreement(max(row[0] for row in table), must_equal)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the default group. Collective."""
    _, world_size = process_world()
    if world_size == 1:
        return flag
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums over all ranks of the default group, in fp64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if process_world()[1] > 1:
        dist.all_reduce(total)
    return total.tolist()
