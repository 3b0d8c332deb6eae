"""Options of the experts' feed-forward network, and checks of its arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import GATES
from ..backends.torch import ACTIVATIONS
from ._operator import check_indices, check_shape


def check_activation(activation: str, dropout_p: float) -> None:
    """Raise ValueError for an unknown activation or a dropout probability outside [0, 1)."""
    if activation not in ACTIVATIONS and activation not in GATES:
        raise ValueError(
            f"unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def activate(z_NF: Tensor, activation: str) -> Tensor:
    """Return the hidden values of rows from those before the activation; not differentiable.

    ``z_NF`` is (N, F), or (N, 2F) of a gated network, the gate's first.
    """
    function, _ = ACTIVATIONS[GATES.get(activation, activation)]
    gate_NF, *up_NF = z_NF.chunk(2 if activation in GATES else 1, 1)
    gate_NF = gate_NF.contiguous()
    active_NF = function(gate_NF, torch.empty_like(gate_NF))
    return active_NF.mul_(up_NF[0]) if up_NF else active_NF


def dropout_seed(
    dropout_p: float, seed: Tensor | int | None, device: torch.device
) -> Tensor | None:
    """Return the seed as an int64 scalar tensor; draw one for None. None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**31, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        # filled by a kernel: a copy from host memory would wait for all work of the GPU
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed


class FFNOptions(NamedTuple):
    """Options of :func:`~fairseq_tutel.ops.expert_ffn`."""

    activation: str
    dropout_p: tuple[float, float]  # after the activation and after fc2
    # index of the slice of hidden units that this rank computes: ranks with equal generators draw
    # different masks for different slices
    part: int = 0
    fp8: bool = False  # the forward pass multiplies in e4m3

    def draw_seed(self, device: torch.device) -> Tensor | None:
        """Draw a seed for the masks of one call; None without dropout."""
        seed = dropout_seed(max(self.dropout_p), None, device)
        # each call uses two seeds, this and the next, for its two masks
        return seed if seed is None or not self.part else seed + 2 * self.part

    def given(self, seed: Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments of the backends' functions."""
        some = {"activation": self.activation, "dropout_p": self.dropout_p, "seed": seed}
        return {**some, "fp8": True} if self.fp8 else some


def check_ffn(
    shape: Sequence[int], params: Sequence[Any], offsets: Tensor | None, gated: bool
) -> None:
    """Raise ValueError unless the rows' shape, parameters and offsets fit together."""
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    _, model_dim, hidden_dim = fc2_weight.shape
    if len(shape) != (3 if offsets is None else 2) or shape[-1] != model_dim:
        raise ValueError(
            f"rows must be (experts, rows, {model_dim}), or (rows, {model_dim}) with offsets; got "
            f"{tuple(shape)} with offsets {offsets is not None}"
        )
    experts = shape[0] if offsets is None else offsets.shape[0]
    width = 2 * hidden_dim if gated else hidden_dim
    for name, param, wanted in (
        ("fc1_weight", fc1_weight, (experts, width, model_dim)),
        ("fc1_bias", fc1_bias, (experts, width)),
        ("fc2_weight", fc2_weight, (experts, model_dim, hidden_dim)),
        ("fc2_bias", fc2_bias, (experts, model_dim)),
    ):
        check_shape(name, param, wanted)
    if offsets is not None:
        check_indices("offsets", offsets, "experts")


def ffn_flops(rows: int, params: Sequence[Any], firsts: int = 1, seconds: int = 1) -> int:
    """Return the FLOPs of products of rows with fc1's weights, and of those with fc2's.

    All rows of a buffer count, as in torch's own formulas: only the device knows how many are used.
    """
    fc1_weight, _, fc2_weight, *_ = params
    products = firsts * fc1_weight.shape[1:].numel() + seconds * fc2_weight.shape[1:].numel()
    return 2 * rows * products
