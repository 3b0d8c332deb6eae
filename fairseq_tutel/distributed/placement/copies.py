"""Experts made from a feed-forward network: copies or slices of the network.

:func:`fairseq_tutel.moe.replace_ffn` and :mod:`fairseq_tutel.checkpoint.growth` use it. Names are
those of one expert in state dicts: ``fc1.weight``, ``fc2.bias``, ``fc_gate.weight``; ``fc2`` is the
output layer.

With granularity G an expert is 1/G of the network: expert ``r*G + g`` has slice g of the hidden
units of replica r. A token of weight W goes to all G slices of a replica, with weight W/G each, and
gets ``sum_g W/G * (A_g h_g + b)``. So only the weight of fc2 is multiplied by G, and its bias is
not. Multiplying both weights by sqrt(G) would be right for ReLU alone.
"""

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
    """Return the tensors of experts; unchanged tensors share their memory with ``ffn``.

    >>> ffn = {"fc1.weight": torch.ones(4, 2), "fc2.weight": torch.ones(2, 4)}
    >>> experts = experts_of_ffn(ffn, range(4), granularity=2)
    >>> experts["3.fc1.weight"].shape, experts["3.fc2.weight"].tolist()
    (torch.Size([2, 2]), [[2.0, 2.0], [2.0, 2.0]])

    Args:
        ffn: the network's tensors by name; weights [F, M] (fc2: [M, F]) and biases.
        numbers: global numbers of the experts.
        granularity: G; F must be a multiple of it (default 1; see the module docstring).
        silent: set fc2 to zero, so that the experts add nothing until they are trained.
        drop_ratio: share of hidden units to draw anew in each expert, from a normal distribution
            with each tensor's mean and deviation (arXiv 2502.19261). Experts drop different units.
        seed: seed of the draws; the expert's number is added.

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
    """Return the dimension of F in a tensor of the network; None for the bias of fc2.

    Programs that only read files have no model, so they cannot ask :func:`.slices.slice_dim`.
    """
    if not name.startswith(_OUTPUT):
        return 0
    return 1 if name == f"{_OUTPUT}weight" else None


def _drawn_anew(part: Tensor, dim: int, units: Tensor, generator: torch.Generator) -> Tensor:
    """Replace some hidden units by normal numbers with the tensor's mean and deviation."""
    wide, shape = part.float(), list(part.shape)
    shape[dim] = len(units)
    values = torch.randn(shape, generator=generator).to(part.device)
    values = values * wide.std() + wide.mean()
    return part.index_copy(dim, units.to(part.device), values.to(part.dtype))
