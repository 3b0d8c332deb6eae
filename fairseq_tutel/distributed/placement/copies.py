"""Experts that are made of a feed-forward network: its copies, or slices of it.

Tensors in, tensors out; :func:`fairseq_tutel.moe.replace_ffn` and
:mod:`fairseq_tutel.checkpoint.growth`, both above this room, make their experts here. The names are
those of one expert in state dicts (``fc1.weight``, ..., ``fc_gate.weight`` of gated ones), of which
``fc2`` leads back to the model's width.

With granularity G an expert is 1/G of the network: expert ``r*G + g`` has slice g of the hidden
units of replica r. A token that goes to all G slices of a replica, with equal weights W/G that sum
to its weight W, gets ``sum_g W/G * (A_g h_g + b)`` of them, so that only the weight of fc2 is
multiplied by G, and its bias is not. Both weights times sqrt(G) would be right for ReLU alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .slices import slice_size

_OUTPUT = "fc2."


def experts_of_ffn(
    ffn: Mapping[str, Tensor],
    numbers: Iterable[int],
    *,
    granularity: int = 1,
    silent: bool = False,
    drop_ratio: float = 0.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Tensors of experts with these global numbers; what is as in ``ffn`` shares its memory.

    Args:
        ffn: the network's tensors by name; weights [F, M] ([M, F] of fc2) and biases.
        numbers: of the experts.
        granularity: G; see the module docstring. F must be a multiple of it.
        silent: fc2 is zero, so that the experts add nothing until they are trained.
        drop_ratio: share of each expert's hidden units that are drawn anew, normal with mean and
            deviation of each tensor (arXiv 2502.19261); other ones in every expert.
        seed: of those draws, with the expert's number.

    Returns:
        ``NUMBER.NAME`` -> tensor of the dtype of ``ffn``.

    Raises:
        ValueError: F is no multiple of G.
    """
    experts: dict[str, Tensor] = {}
    for number in numbers:
        generator = torch.Generator().manual_seed(seed + number)
        drawn: Tensor | None = None
        for name, whole in ffn.items():
            part, dim = whole.detach(), _hidden_dim(name)
            if granularity > 1 and dim is not None:
                size = slice_size(part.shape[dim], granularity)
                part = part.narrow(dim, number % granularity * size, size)
            is_output = name.startswith(_OUTPUT)
            if is_output and silent:
                part = torch.zeros_like(part)
            elif is_output and dim is not None and granularity > 1:
                part = part * granularity
            if drop_ratio and dim is not None and not (silent and is_output):
                if drawn is None:
                    order = torch.randperm(part.shape[dim], generator=generator)
                    drawn = order[: round(drop_ratio * len(order))]
                part = _drawn_anew(part, dim, drawn, generator)
            experts[f"{number}.{name}"] = part
    return experts


def _hidden_dim(name: str) -> int | None:
    """Dimension F of a tensor of the network; None of the bias of fc2.

    What networks of experts declare of theirs (:mod:`.slices`) is not known to a program that
    reads files, and has no model.
    """
    if not name.startswith(_OUTPUT):
        return 0
    return 1 if name == f"{_OUTPUT}weight" else None


def _drawn_anew(part: Tensor, dim: int, units: Tensor, generator: torch.Generator) -> Tensor:
    """With normal numbers of the tensor's own moments in place of some hidden units."""
    wide, shape = part.float(), list(part.shape)
    shape[dim] = len(units)
    values = torch.randn(shape, generator=generator).to(part.device)
    values = values * wide.std() + wide.mean()
    return part.index_copy(dim, units.to(part.device), values.to(part.dtype))
