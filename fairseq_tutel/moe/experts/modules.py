"""Experts that are the user's own modules."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...distributed import ExpertParallelGroups
from .base import ExpertBank, ExpertRows, PreparedExperts


class ExpertList(nn.ModuleList, ExpertBank):
    """Bank of the user's modules, each [n, M] -> [n, M]; called one after the other."""

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__(experts)
        self.mark()

    def kept_per_row(self, model_dim: int) -> int:
        matrices = [param.numel() for param in self.parameters() if param.dim() == 2]
        return sum(matrices) // len(self) // model_dim

    def forward(self, batch: ExpertRows, prepared: PreparedExperts | None = None) -> torch.Tensor:
        """Call each expert on its rows. NOTE: the host reads the counts of ragged rows."""
        if batch.offsets is None:
            return torch.stack([self._rows(*pair) for pair in zip(self, batch.rows, strict=True)])
        *parts, rest = batch.rows.tensor_split(batch.offsets.tolist())
        return torch.cat([*(self._rows(*pair) for pair in zip(self, parts, strict=True)), rest])

    def _rows(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return expert(rows)
        name, (n, width) = type(expert).__name__, rows.shape
        wanted = f"an expert maps [n, {width}] to the same shape; {name} got [{n}, {width}]"
        try:
            found = expert(rows)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not re.search("shape|size", str(error)):
                raise
            raise ValueError(f"{wanted}: {error}") from error
        if found.shape != rows.shape:
            raise ValueError(f"{wanted}, and made {list(found.shape)} of it")
        return found


# modules, a function that makes one, or a bank of all local experts
OwnExperts = Sequence[nn.Module] | Callable[[], nn.Module] | ExpertBank


def is_function(given: Any) -> bool:
    """Return whether this makes experts, and is none."""
    return callable(given) and not isinstance(given, nn.Module)


def own_experts(given: OwnExperts, groups: ExpertParallelGroups, seed: int | None) -> ExpertBank:
    """Return the bank of the user's experts: the given one, or modules, given or made."""
    if isinstance(given, ExpertBank) and not isinstance(given, ExpertList):
        return given
    experts: Any = _make_each(given, groups, seed) if is_function(given) else given
    if not isinstance(experts, Sequence | nn.ModuleList):
        raise ValueError(f"experts must be a list of modules, got {type(experts).__name__}")
    if len(experts) != groups.num_local_experts:
        local = f"{groups.num_local_experts} of {groups.num_experts} experts"
        raise ValueError(f"{len(experts)} expert modules given, but this rank holds {local}")
    _refuse_shared(experts, groups)
    if groups.num_slices > 1:
        raise ValueError(
            f"experts={type(experts[0]).__name__}: modules of one's own cannot be cut into the "
            f"{groups.num_slices} slices of placement='sliced'; use placement='replicated'"
        )
    return ExpertList([*experts])


def _refuse_shared(experts: Iterable[nn.Module], groups: ExpertParallelGroups) -> None:
    """Raise ValueError for a parameter of several experts: each rank would train its own copy."""
    owners: dict[nn.Parameter, int] = {}
    for number, expert in enumerate(experts if groups.communicates else ()):
        for name, param in expert.named_parameters():
            first = owners.setdefault(param, number)
            if first != number:
                raise ValueError(
                    f"experts {first} and {number} of this rank share {name}, which the experts of "
                    "other ranks cannot: give each expert its own, or keep all experts on each "
                    f"rank (groups=build_groups({groups.num_experts}, expert_parallel_size=1))"
                )


def with_width(
    model_dim: int | None, given: OwnExperts | None, groups: ExpertParallelGroups, seed: int | None
) -> tuple[ExpertList | None, int]:
    """Return the own experts if they had to be made to find M (else None), and M.

    M is by default the input width of the first linear layer of the first expert.
    """
    if model_dim is not None:
        return None, model_dim
    own = None if given is None else own_experts(given, groups, seed)
    if not isinstance(own, ExpertList):
        raise TypeError("an MoE layer needs model_dim, or expert_fn= or experts= that say it")
    for module in own[0].modules():
        if isinstance(module, nn.Linear) and module.in_features:
            return own, module.in_features
    name = type(own[0]).__name__
    raise ValueError(f"{name} has no linear layer that says the width: give model_dim=")


def _make_each(function, groups, seed) -> list[nn.Module]:
    """Call ``function`` for each local expert, seeded by ``seed`` and the global index."""
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    experts = []
    with torch.random.fork_rng(devices):
        for index in groups.local_experts:
            torch.manual_seed(seed + index)
            experts.append(function())
    if not all(isinstance(expert, nn.Module) for expert in experts):
        raise ValueError(f"the function of experts must make modules, but made {experts[0]!r}")
    if len(set(map(id, experts))) < len(experts):
        raise ValueError("the function of experts made the same module twice: make a new one")
    return experts
