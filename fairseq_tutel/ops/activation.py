"""Checks of the experts' activation and dropout; :mod:`.expert_ffn` computes them."""

import torch
from torch import Tensor

from ..backends.torch import ACTIVATIONS


def check_activation(activation: str, dropout_p: float) -> None:
    """Raise ValueError for an unknown activation or a dropout probability outside [0, 1)."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def dropout_seed(
    dropout_p: float, seed: Tensor | int | None, device: torch.device
) -> Tensor | None:
    """The seed as an int64 scalar tensor, drawn where there is none; None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**31, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        # filled by a kernel: a copy from host memory would wait for all work of the GPU
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed
