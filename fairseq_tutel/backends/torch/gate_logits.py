"""The gate's product in fp32."""

import torch
from torch import Tensor


def gate_logits_fwd(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Return ``x @ weight.T``, (T, E) in fp32 (fp64 for fp64)."""
    acc = torch.promote_types(x_TM.dtype, torch.float32)
    return torch.mm(x_TM.to(acc), weight_EM.to(acc).t())


def gate_logits_bwd(
    d_logits_TE: Tensor,
    x_TM: Tensor,
    weight_EM: Tensor,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`gate_logits_fwd`: d_x like x, d_weight like the weight.

    A gradient that is not needed comes back with shape (0,).
    """
    acc = d_logits_TE.dtype
    d_x_TM, d_weight_EM = x_TM.new_empty(0), weight_EM.new_empty(0)
    if needs_x:
        d_x_TM = torch.mm(d_logits_TE, weight_EM.to(acc)).to(x_TM.dtype)
    if needs_weight:
        d_weight_EM = torch.mm(d_logits_TE.t(), x_TM.to(acc)).to(weight_EM.dtype)
    return d_x_TM, d_weight_EM
