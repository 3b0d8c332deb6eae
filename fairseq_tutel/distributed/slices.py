"""Slices of an expert: which part of which tensor a rank holds under the placement ``sliced``.

The hidden units of an expert are cut into S neighbouring parts of F/S. Slice s has what belongs to
its units: rows of fc1's weight and values of its bias, columns of fc2's weight. fc2's bias belongs
to no unit; every holder has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# by the end of a name in state dicts, as fairseq's moe branch has them
_SLICE_DIMS = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": None}


def slice_dim(name: str) -> int | None:
    """The dimension along which one expert's tensor is cut; None where every holder has all of it.

    Args:
        name: in a state dict, with any prefix: ``layers.1.moe_layer.experts.0.fc2.weight``. Fp32
            copies and moments are cut like the parameters that they belong to.

    Raises:
        ValueError: not a tensor of a built-in expert.
    """
    end = ".".join(name.split(".")[-2:])
    if end not in _SLICE_DIMS:
        raise ValueError(f"{name} is no tensor of an expert that can be in slices")
    return _SLICE_DIMS[end]


def take_slice(whole: torch.Tensor, name: str, index: int, count: int) -> torch.Tensor:
    """Slice ``index`` of ``count`` of one expert's tensor; a view.

    Args:
        whole: [F, M], [F], [M, F] or [M].
        name: see :func:`slice_dim`.

    Raises:
        ValueError: the hidden units cannot be cut so.
    """
    dim = slice_dim(name)
    if dim is None or count == 1:
        return whole
    size = slice_size(whole.shape[dim], count)
    return whole.narrow(dim, index * size, size)


def whole_shape(part: Sequence[int], name: str, count: int) -> torch.Size:
    """Shape of the whole of which a slice has the shape ``part``; see :func:`take_slice`."""
    dim, shape = slice_dim(name), list(part)
    if dim is not None:
        shape[dim] *= count
    return torch.Size(shape)


def slice_size(hidden_dim: int, count: int) -> int:
    """F/S.

    Raises:
        ValueError: F is not a multiple of S.
    """
    if hidden_dim % count:
        raise ValueError(
            f"the {hidden_dim} hidden units of an expert cannot be cut into {count} slices, one "
            f"for each of its ranks: choose a multiple of {count}, or placement='replicated' "
            "(--moe-expert-placement)"
        )
    return hidden_dim // count
