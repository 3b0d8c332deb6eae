"""The gate's product in fp32; a GPU computes it on matrix units.

On a GPU, fp32 products of the gate's gradient would cost a tenth of the experts' products. So an
fp32 operand is split into the sum of two halves (16 bits of mantissa in bf16, 22 in fp16). Matrix
units multiply these and add up in fp32.
"""

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
# Since torch 2.8 mm has a dtype of its result.
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


def gate_logits_fwd(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Return ``x @ weight.T``, (T, E) in fp32 (fp64 for fp64)."""
    if _on_matrix_units(x_TM):
        return _logits_from_halves(x_TM, weight_EM)
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
    if _on_matrix_units(x_TM):
        return _gradients_from_halves(d_logits_TE, x_TM, weight_EM, needs_x, needs_weight)
    acc = d_logits_TE.dtype
    d_x_TM, d_weight_EM = x_TM.new_empty(0), weight_EM.new_empty(0)
    if needs_x:
        d_x_TM = torch.mm(d_logits_TE, weight_EM.to(acc)).to(x_TM.dtype)
    if needs_weight:
        d_weight_EM = torch.mm(d_logits_TE.t(), x_TM.to(acc)).to(weight_EM.dtype)
    return d_x_TM, d_weight_EM


def _on_matrix_units(x_TM: Tensor) -> bool:
    return x_TM.is_cuda and x_TM.dtype in _HALVES and x_TM.numel() > 0


def _logits_from_halves(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    if weight_EM.dtype == x_TM.dtype:
        return _product_fp32(x_TM, weight_EM.t())
    # both halves of the weight side by side: the tokens are read once
    halves_2EM, shift = split_halves(weight_EM, x_TM.dtype, dim=0)
    both_T2E = _product_fp32(x_TM, halves_2EM.t())
    num_experts = weight_EM.shape[0]
    logits_TE = both_T2E[:, :num_experts] + both_T2E[:, num_experts:]
    return logits_TE if shift is None else torch.ldexp(logits_TE, -shift)


def _gradients_from_halves(d_logits_TE, x_TM, weight_EM, needs_x, needs_weight):
    """Compute each gradient by one split and one product."""
    num_experts, dtype = weight_EM.shape[0], x_TM.dtype
    d_T2E, shift = split_halves(d_logits_TE, dtype, dim=1)
    d_x_TM, d_weight_EM = x_TM.new_empty(0), weight_EM.new_empty(0)
    if needs_x:
        # [high | low] @ [w; w], and the sum of both never leaves the matrix units' registers
        twice_2EM = weight_EM.to(dtype).repeat(2, 1)
        if shift is None:
            d_x_TM = torch.mm(d_T2E, twice_2EM)
        else:  # in fp16 the scaled product may be too large
            d_x_TM = torch.ldexp(_product_fp32(d_T2E, twice_2EM), -shift).to(dtype)
    if needs_weight:
        both_2EM = _product_fp32(d_T2E.t(), x_TM)
        total_EM = both_2EM[:num_experts] + both_2EM[num_experts:]
        total_EM = total_EM if shift is None else torch.ldexp(total_EM, -shift)
        d_weight_EM = total_EM.to(weight_EM.dtype)
    return d_x_TM, d_weight_EM


def split_halves(wide: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor | None]:
    """Split an fp32 matrix (A, B) into the sum of two matrices of a half dtype.

    Returns:
        both matrices, one below the other, (2A, B), for ``dim`` 0, or side by side, (A, 2B), for 1;
        the shift: their sum is ``2^shift * wide``. None for bf16, which has fp32's range.
    """
    shift = None
    if dtype == torch.float16:
        # brings the largest number into [2^13, 2^14): it fits, and small ones keep their digits
        shift = (14 - torch.frexp(wide.abs().amax()).exponent).clamp(-100, 100)
        wide = torch.ldexp(wide, shift)
    shape = list(wide.shape)
    shape[dim] *= 2
    halves = wide.new_empty(shape, dtype=dtype)
    high, low = halves.chunk(2, dim)
    high.copy_(wide)
    torch.sub(wide, high, out=low)  # in fp32, rounded once
    return halves, shift


def _product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply halves and return the fp32 sums without rounding."""
    if a.is_cuda and _MM_WIDENS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # torch below 2.8 and CPUs have no such product
