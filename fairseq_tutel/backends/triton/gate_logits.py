"""The gate's product in fp32 on matrix units.

fp32 products of the gate's gradient would cost a tenth of the experts' products. So an fp32 operand
is split into the sum of two halves (16 bits of mantissa in bf16, 22 in fp16). Matrix units multiply
these and add up in fp32. In fp16, which has a small range, the operand is scaled by a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import FLAT_BLOCK
from ._runtime import device_guard
from ._sizes import cdiv

# Since torch 2.8 mm has a dtype of its result.
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


@triton.jit
def _power_of_2(largest_ptr, sign: tl.constexpr):
    """Return 2^(sign * shift), where 2^shift brings the largest number into [2^13, 2^14).

    Scaled numbers fit fp16, and small ones keep their digits.
    """
    bits = tl.load(largest_ptr).to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) - 126
    shift = tl.minimum(tl.maximum(14 - exponent, -100), 100)
    return ((127 + sign * shift) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_elements"])
def _split_kernel(
    out_ptr,  # (A, 2, B) or (2, A, B) half - output; part p of row r: r * stride + p * distance
    wide_ptr,  # (A, B) fp32
    largest_ptr,  # () fp32 - the largest absolute value, or None: not scaled
    twice_ptr,  # (2, C) half - output: two copies of the factor, or None
    factor_ptr,  # (C,) float, or None
    num_elements,
    stride,
    distance,
    B: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(A * B, BLOCK) + cdiv(C, BLOCK),): first the split, then the copies.

    The first part is rounded, the second one the rest, rounded.

    Example: in bf16, wide [[1.00390625, 2]], B = 2, stride 4, distance 2
    -> out [[1, 2, 0.00390625, 0]]; factor [3] -> twice [[3], [3]].
    """
    block = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(num_elements, BLOCK)
    if factor_ptr is not None:
        offs_c = (block - num_blocks) * BLOCK + tl.arange(0, BLOCK)
        mask_c = (offs_c >= 0) & (offs_c < C)
        factor = tl.load(factor_ptr + offs_c, mask=mask_c, other=0.0).to(twice_ptr.dtype.element_ty)
        tl.store(twice_ptr + offs_c, factor, mask=mask_c)
        tl.store(twice_ptr + C + offs_c, factor, mask=mask_c)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    wide = tl.load(wide_ptr + offs, mask=mask, other=0.0)
    if largest_ptr is not None:
        wide *= _power_of_2(largest_ptr, 1)
    high = wide.to(out_ptr.dtype.element_ty)
    low = wide - high.to(tl.float32)
    row = offs // B
    out_ptr += row * stride + offs - row * B
    tl.store(out_ptr, high, mask=mask)
    tl.store(out_ptr + distance, low.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def _join_kernel(
    out_ptr,  # (A, B) - output: sum of the parts, scaled back, rounded once; ADD: plus its values
    parts_ptr,  # (A, 2, B) or (2, A, B) fp32 - part p of row r: r * stride + p * distance
    largest_ptr,  # () fp32 - as of the split, or None
    num_elements,
    stride,
    distance,
    TWO: tl.constexpr,  # whether there is a second part
    ADD: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(A * B, BLOCK),).

    Example: parts [[1, 2], [10, 20]], B = 2, stride 2, distance 2, one row, TWO -> out [[11, 22]];
    ADD to [[100, 0]] -> out [[111, 22]].
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    row = offs // B
    parts_ptr += row * stride + offs - row * B
    total = tl.load(parts_ptr, mask=mask, other=0.0)
    if TWO:
        total += tl.load(parts_ptr + distance, mask=mask, other=0.0)
    if largest_ptr is not None:
        total *= _power_of_2(largest_ptr, -1)
    if ADD:
        total += tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def gate_logits_fwd(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.gate_logits_fwd` for one half token or more."""
    if weight_EM.dtype == x_TM.dtype:
        return _product_fp32(x_TM, weight_EM.t())
    # both halves of the weight side by side: the tokens are read once
    halves_2EM, largest, _ = _split(weight_EM, x_TM.dtype, dim=0)
    both_T2E = _product_fp32(x_TM, halves_2EM.t())
    num_experts = weight_EM.shape[0]
    return _join(both_T2E, largest, (len(x_TM), num_experts), torch.float32, num_experts)


def gate_logits_bwd(
    d_logits_TE: Tensor,
    x_TM: Tensor,
    weight_EM: Tensor,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
    onto_TM: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.gate_logits_bwd`: one split, and a product each.

    With ``onto_TM``, contiguous and in the dtype of x, d_x is added to it in place.
    """
    dtype = x_TM.dtype
    d_T2E, largest, twice_2EM = _split(d_logits_TE, dtype, 1, weight_EM if needs_x else None)
    d_x_TM, d_weight_EM = x_TM.new_empty(0), weight_EM.new_empty(0)
    if twice_2EM is not None:
        # [high | low] @ [w; w], and the sum of both never leaves the matrix units' registers
        if largest is not None:  # in fp16 the scaled product may be too large
            wide_TM = _product_fp32(d_T2E, twice_2EM)
            d_x_TM = _join(wide_TM, largest, x_TM.shape, dtype, onto=onto_TM)
        elif onto_TM is None:
            d_x_TM = torch.mm(d_T2E, twice_2EM)
        else:
            d_x_TM = onto_TM.addmm_(d_T2E, twice_2EM)
    if needs_weight:
        both_2EM = _product_fp32(d_T2E.t(), x_TM)
        shape = weight_EM.shape
        d_weight_EM = _join(both_2EM, largest, shape, weight_EM.dtype, weight_EM.numel())
    return d_x_TM, d_weight_EM


def _split(
    wide_AB: Tensor, dtype: torch.dtype, dim: int, factor_EM: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Split an fp32 matrix (A, B) into the sum of two matrices of a half dtype.

    Returns:
        both matrices, one below the other, (2A, B), for ``dim`` 0, or side by side, (A, 2B), for 1;
        the largest absolute value, by which they are scaled; None for bf16, which has fp32's range;
        two copies of the factor, one below the other, (2E, M), or None.
    """
    (A, B), wide_AB = wide_AB.shape, wide_AB.contiguous()
    halves = wide_AB.new_empty((2 * A, B) if dim == 0 else (A, 2 * B), dtype=dtype)
    stride, distance = (B, A * B) if dim == 0 else (2 * B, B)
    largest = None
    if dtype == torch.float16:
        largest = torch.linalg.vector_norm(wide_AB, float("inf"))
    twice, C = None, 0
    if factor_EM is not None:
        (E, M), C = factor_EM.shape, factor_EM.numel()
        factor_EM = factor_EM.to(dtype).contiguous()
        twice = wide_AB.new_empty((2 * E, M), dtype=dtype)
    with device_guard(wide_AB):
        _split_kernel[(cdiv(A * B, FLAT_BLOCK) + cdiv(C, FLAT_BLOCK),)](
            halves,
            wide_AB,
            largest,
            twice,
            factor_EM,
            A * B,
            stride,
            distance,
            B=B,
            C=C,
            BLOCK=FLAT_BLOCK,
        )
    return halves, largest, twice


def _join(
    parts: Tensor,
    largest: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    distance: int = 0,
    onto: Tensor | None = None,
) -> Tensor:
    """Add up the parts of a product of halves, ``distance`` numbers apart (0: one part).

    The sum is added to ``onto`` in place, if given.
    """
    (A, B), out_AB = shape, parts.new_empty(shape, dtype=dtype) if onto is None else onto
    with device_guard(parts):
        _join_kernel[(cdiv(A * B, FLAT_BLOCK),)](
            out_AB,
            parts,
            largest,
            A * B,
            parts.stride(0),
            distance,
            TWO=distance > 0,
            ADD=onto is not None,
            B=B,
            BLOCK=FLAT_BLOCK,
        )
    return out_AB


def _product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply halves and return the fp32 sums without rounding."""
    if a.is_cuda and _MM_WIDENS and not torch.version.hip and not _sums_in_fp16(a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    # torch below 2.8, ROCm (some versions) and CPUs have no such product
    return a.float() @ b.float()


def _sums_in_fp16(dtype: torch.dtype) -> bool:
    """Return whether the user lets torch add up in fp16: then it refuses results in fp32."""
    allowed = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return allowed and dtype == torch.float16
