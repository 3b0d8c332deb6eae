"""Experts that are modules of the user's own."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from ...distributed import ExpertParallelGroups
from ..chunks import ExpertRows
from .base import ExpertBank, ExpertCall


class ExpertList(nn.ModuleList, ExpertBank):
    """Custom expert modules, each mapping [n, M] to [n, M]; called one after the other."""

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__(experts)
        self.mark()

    def kept_per_row(self, model_dim: int) -> int:
        matrices = [param.numel() for param in self.parameters() if param.dim() == 2]
        return sum(matrices) // len(self) // model_dim

    def forward(self, batch: ExpertRows, call: ExpertCall | None = None) -> torch.Tensor:
        """NOTE: the host reads the counts of ragged rows."""
        if batch.offsets is None:
            return torch.stack([self._rows(*pair) for pair in zip(self, batch.rows, strict=True)])
        ends = batch.offsets.tolist()
        sizes = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        tail = batch.rows.shape[0] - ends[-1]
        *parts, rest = batch.rows.split([*sizes, tail])
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


def custom_experts(experts: Sequence[nn.Module], groups: ExpertParallelGroups) -> ExpertList:
    """The user's own modules as this rank's experts, or ValueError."""
    if not isinstance(experts, Sequence | nn.ModuleList):
        raise ValueError(f"experts must be a list of modules, got {type(experts).__name__}")
    if len(experts) != groups.num_local_experts:
        raise ValueError(
            f"{len(experts)} expert modules given, but this rank holds "
            f"{groups.num_local_experts} of {groups.num_experts} experts"
        )
    if groups.num_slices > 1:
        raise ValueError(
            f"experts={type(experts[0]).__name__}: modules of one's own cannot be cut into the "
            f"{groups.num_slices} slices of placement='sliced'; use placement='replicated'"
        )
    return ExpertList(experts)
