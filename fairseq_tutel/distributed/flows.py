"""How tokens and weights meet: either may travel to the other, in any proportion (r).

Tutel's switchable parallelism (Hwang et al., arXiv 2206.03382, section 3.1). With experts in S
slices (E < W, rank s*E + j has slice s of expert j) one placement serves every r, so that a switch
moves nothing:

    r = 0        tokens stay where they are, and every rank gathers all weights
    1 <= r <= S  a divisor of S. Tokens go to r ranks, of which each computes F/r hidden units of
                 their expert, for which it gathers the S/r slices; the r results are added where
                 the tokens are
    r = S        nothing is gathered

With s = p*r + q a rank is in super-block p, the ranks [p*r*E, (p+1)*r*E) that exchange tokens, and
has part q of the hidden units, which ranks of equal q and j have together. That is the placement of
r*E experts on W ranks (:mod:`.groups`): a *part* takes the place of an expert there, and what
exchanges rows knows nothing of r. Where experts are whole (S = 1), r = 1 is the exchange as ever,
and r = 0 gathers the experts of the exchange group.

A larger r sends more rows and gathers fewer weights: with R rows of a rank and F hidden units about
sqrt(F/R) is best where both travel equally fast, and r = 0 if R > E*F.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .groups import ExpertParallelGroups, create_group
from .teardown import release_at_exit
from .world import once_per_world


@dataclass(frozen=True)
class Flow:
    """One way for tokens and weights to meet; see the module docstring.

    Attributes:
        r: of the module docstring.
        groups: placement of the experts.
        exchange_groups: placement of the parts among whose ranks tokens are exchanged; of all
            experts on one rank with r = 0.
        gather_group: the ranks whose weights are gathered; None where there is one, or simulated.
        gathered: (slices, experts) that these ranks have, slice-major; (1, e): nothing is gathered.
    """

    r: int
    groups: ExpertParallelGroups
    exchange_groups: ExpertParallelGroups
    gather_group: Any | None
    gathered: tuple[int, int]

    def __post_init__(self):
        if self.gather_group is not None:
            release_at_exit(self)

    def release(self) -> None:
        """Refer to no process group any more, when the process ends."""
        object.__setattr__(self, "gather_group", None)

    @property
    def is_plain(self) -> bool:
        """Whether it is the exchange of tokens between whole experts, as without flows."""
        return self.r == 1 and self.groups.placement == "replicated"

    @property
    def gather_size(self) -> int:
        """Ranks whose weights are gathered."""
        slices, experts = self.gathered
        return slices * experts // self.groups.num_local_experts

    @property
    def copies(self) -> int:
        """Ranks that each token of an expert goes to."""
        return max(self.r, 1)

    @property
    def has_output_bias(self) -> bool:
        """Whether this rank adds fc2's bias: one of the parts of an expert does."""
        return self.part == 0

    @property
    def part(self) -> int:
        """q, of the ``copies`` parts into which an expert is cut."""
        return self.exchange_groups.ep_rank // self.groups.num_experts


def possible_r(groups: ExpertParallelGroups) -> list[int]:
    """0, and the divisors of the number of slices."""
    slices = groups.num_slices
    return [0, *(r for r in range(1, slices + 1) if slices % r == 0)]


def make_flow(groups: ExpertParallelGroups, r: int) -> Flow:
    """The flow r of a placement of experts. Collective when first made; all ranks make the same.

    Raises:
        ValueError: not a possible r.
    """
    possible = possible_r(groups)
    if r not in possible:
        held = f"in {groups.num_slices} slices" if groups.num_slices > 1 else "whole"
        raise ValueError(
            f"r={r} (--moe-parallelism-r) does not fit {groups.num_experts} experts on "
            f"{groups.world_size} ranks with placement={groups.placement!r}, which are {held}: "
            f"choose one of {', '.join(map(str, possible))}"
        )
    if groups.simulated or groups.world_size == 1:
        return _make(groups, r)
    return once_per_world(("flow", groups, r), lambda: _make(groups, r))


def _make(groups: ExpertParallelGroups, r: int) -> Flow:
    slices, local = groups.num_slices, groups.num_local_experts
    if r == 0:
        alone = ExpertParallelGroups(
            groups.num_experts,
            rank=groups.rank,
            world_size=groups.world_size,
            num_replicas=groups.world_size,
            simulated=groups.simulated,
        )
        gathered = (slices, groups.num_experts)
        group = groups.ep_group
        if slices > 1 and not groups.simulated:
            group = dist.group.WORLD
        return Flow(r, groups, alone, group, gathered)
    if slices == 1:
        return Flow(r, groups, groups, None, (1, local))
    parts = dataclasses.replace(
        groups,
        num_experts=r * groups.num_experts,
        ep_size=r * groups.num_experts,
        num_replicas=slices // r,
        ep_group=None,
        replica_group=None,
        control_group=None,
        placement="replicated",
    )
    if not groups.simulated:
        holders = [range(i, groups.world_size, parts.ep_size) for i in range(parts.ep_size)]
        parts = dataclasses.replace(
            parts, ep_group=create_group(parts.blocks), replica_group=create_group(holders)
        )
    return Flow(r, groups, parts, parts.replica_group, (slices // r, 1))
