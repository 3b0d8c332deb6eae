"""Adam with fp16 statistics as two kernels; the scheme is that of ``backends/torch/adam.py``.

The new scale must be known before the first new statistic is stored, so a step makes two sweeps:

1. ``_adam16_max_kernel`` reads gradient and statistics and keeps the largest finite magnitude of
   the new statistics of each slice. Positive floats are ordered like their bits, so an integer
   atomic maximum does it, independent of the order of the blocks.
2. ``_adam16_step_kernel`` reads them again with the parameter, updates the parameter from the
   unrounded statistics, and stores the rounded ones.

Bytes per parameter, parameter and gradient in half: 6 read, then 8 read and 6 written; no
temporary of the size of the parameter exists.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _new_statistics(
    grad, avg, sq, avg_scale, sq_scale, grad_multiplier, beta1, beta2, grad_weight, square_weight
):
    """New exp_avg and exp_avg_sq, fp32, of one block. The weights are 1 - beta, rounded once:
    taken from an fp32 beta2 of 0.999 here, they would be off by 1e-5."""
    g = grad.to(tl.float32) * grad_multiplier
    new_avg = avg.to(tl.float32) * avg_scale * beta1 + g * grad_weight
    new_sq = sq.to(tl.float32) * sq_scale * beta2 + g * g * square_weight
    return new_avg, new_sq


@triton.jit
def _finite_max_bits(x):
    """Largest finite magnitude of a block, as the bits of an fp32."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=0)


@triton.jit
def _scale_of_bits(bits):
    """``scale_of_max`` there of the fp32 with these bits, and its inverse.

    Both are normal numbers; made from bits, since a division may be approximate on a GPU.
    """
    exponent = tl.where(bits > 0, tl.maximum((bits >> 23) - 14, 1), 127)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _adam16_max_kernel(
    max_bits_ptr,  # (2, S) int32 - output, zero at start: maxima of exp_avg and of exp_avg_sq
    grad_ptr,  # (S, N) float
    avg_ptr,  # (S, N) fp16 - exp_avg
    sq_ptr,  # (S, N) fp16 - exp_avg_sq
    avg_scale_ptr,  # (S,) fp32
    sq_scale_ptr,  # (S,) fp32
    grad_multiplier_ptr,  # () fp32
    num_elements,  # N
    num_slices,  # S
    beta1,
    beta2,
    grad_weight,  # 1 - beta1
    square_weight,  # 1 - beta2
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(N, BLOCK), S)."""
    pid_s = tl.program_id(1)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    offs += pid_s.to(tl.int64) * num_elements
    avg, sq = _new_statistics(
        tl.load(grad_ptr + offs, mask=mask, other=0.0),
        tl.load(avg_ptr + offs, mask=mask, other=0.0),
        tl.load(sq_ptr + offs, mask=mask, other=0.0),
        tl.load(avg_scale_ptr + pid_s),
        tl.load(sq_scale_ptr + pid_s),
        tl.load(grad_multiplier_ptr),
        beta1,
        beta2,
        grad_weight,
        square_weight,
    )
    tl.atomic_max(max_bits_ptr + pid_s, _finite_max_bits(avg), sem="relaxed")
    tl.atomic_max(max_bits_ptr + num_slices + pid_s, _finite_max_bits(sq), sem="relaxed")


@triton.jit
def _adam16_step_kernel(
    new_avg_scale_ptr,  # (S,) fp32 - output
    new_sq_scale_ptr,  # (S,) fp32 - output
    param_ptr,  # (S, N) float - updated in place
    avg_ptr,  # (S, N) fp16 - exp_avg, updated in place
    sq_ptr,  # (S, N) fp16 - exp_avg_sq, updated in place
    grad_ptr,  # (S, N) float
    avg_scale_ptr,  # (S,) fp32 - scales the statistics were stored with
    sq_scale_ptr,  # (S,) fp32
    max_bits_ptr,  # (2, S) int32 - maxima of the new statistics
    grad_multiplier_ptr,  # () fp32
    num_elements,  # N
    num_slices,  # S
    step_size,  # lr * sqrt(1 - beta2^t) / (1 - beta1^t)
    decay,  # lr * weight_decay
    beta1,
    beta2,
    grad_weight,  # 1 - beta1
    square_weight,  # 1 - beta2
    eps,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(N, BLOCK), S)."""
    pid_n = tl.program_id(0)
    pid_s = tl.program_id(1)
    offs = pid_n.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    offs += pid_s.to(tl.int64) * num_elements
    avg, sq = _new_statistics(
        tl.load(grad_ptr + offs, mask=mask, other=0.0),
        tl.load(avg_ptr + offs, mask=mask, other=0.0),
        tl.load(sq_ptr + offs, mask=mask, other=0.0),
        tl.load(avg_scale_ptr + pid_s),
        tl.load(sq_scale_ptr + pid_s),
        tl.load(grad_multiplier_ptr),
        beta1,
        beta2,
        grad_weight,
        square_weight,
    )

    param = tl.load(param_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    param -= decay * param
    param -= step_size * tl.div_rn(avg, tl.sqrt_rn(sq) + eps)
    tl.store(param_ptr + offs, param.to(param_ptr.dtype.element_ty), mask=mask)

    new_avg_scale, avg_inverse = _scale_of_bits(tl.load(max_bits_ptr + pid_s))
    new_sq_scale, sq_inverse = _scale_of_bits(tl.load(max_bits_ptr + num_slices + pid_s))
    # 2**-14 is fp16's smallest normal number, 2**-24 the distance of its subnormal numbers: there
    # exp_avg_sq is rounded up, never to zero.
    avg *= avg_inverse
    sq *= sq_inverse
    sq = tl.where(sq < 2.0**-14, tl.ceil(sq * 2.0**24) * 2.0**-24, sq)
    tl.store(avg_ptr + offs, avg.to(tl.float16), mask=mask)
    tl.store(sq_ptr + offs, sq.to(tl.float16), mask=mask)
    if pid_n == 0:
        tl.store(new_avg_scale_ptr + pid_s, new_avg_scale)
        tl.store(new_sq_scale_ptr + pid_s, new_sq_scale)


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scale: Tensor) -> None:
    for name, x in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if x.shape != param.shape or x.device != param.device:
            raise ValueError(
                f"adam16_step_: {name} is {tuple(x.shape)} on {x.device}, but the parameter is "
                f"{tuple(param.shape)} on {param.device}"
            )
    if exp_avg.dtype != torch.float16 or exp_avg_sq.dtype != torch.float16:
        raise ValueError(
            f"adam16_step_: statistics must be float16, not {exp_avg.dtype}, {exp_avg_sq.dtype}"
        )
    if param.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"adam16_step_: no kernel for parameters of {param.dtype}")
    if not (param.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()):
        raise ValueError("adam16_step_: parameter and statistics must be contiguous")
    if scale.dim() > 0 and (param.dim() == 0 or scale.shape != param.shape[:1]):
        raise ValueError(
            f"adam16_step_: scale {tuple(scale.shape)} does not fit parameter {tuple(param.shape)}"
        )


def adam16_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_multiplier: Tensor,
) -> tuple[Tensor, Tensor]:
    """``adam16_step_`` of ``backends.torch`` (same arguments, results and errors of rounding).

    Raises:
        ValueError: unequal shapes or devices, statistics that are not fp16, fp64 parameters,
            a parameter or statistic that is not contiguous.
    """
    _check(param, grad, exp_avg, exp_avg_sq, exp_avg_scale)
    num_slices = max(exp_avg_scale.numel(), 1)
    num_elements = param.numel() // num_slices
    new_avg_scale = torch.ones_like(exp_avg_scale)
    new_sq_scale = torch.ones_like(exp_avg_sq_scale)
    if param.numel() == 0:
        return new_avg_scale, new_sq_scale
    grad = grad.contiguous()
    # zeros, because the maximum is accumulated by atomics
    max_bits = torch.zeros(2, num_slices, dtype=torch.int32, device=param.device)
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    weights = (beta1, beta2, 1 - beta1, 1 - beta2)
    grid = (triton.cdiv(num_elements, BLOCK), num_slices)
    with torch.cuda.device_of(param):
        _adam16_max_kernel[grid](
            max_bits, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale,
            grad_multiplier, num_elements, num_slices, *weights, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _adam16_step_kernel[grid](
            new_avg_scale, new_sq_scale, param, exp_avg, exp_avg_sq, grad,
            exp_avg_scale, exp_avg_sq_scale, max_bits, grad_multiplier, num_elements, num_slices,
            step_size, lr * weight_decay, *weights, eps, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return new_avg_scale, new_sq_scale
