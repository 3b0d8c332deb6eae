"""Adam with fp16 statistics as two kernels; the scheme is that of ``backends/torch/adam.py``.

The new scale must be known before the first new statistic is stored, so a step makes two sweeps:

1. ``_adam16_max_kernel`` reads gradient and statistics and keeps the largest finite magnitude of
   the new statistics of each slice: each program that of its share, without atomics. Positive
   floats are ordered like their bits, so the maximum is one of integers.
2. ``_adam16_step_kernel`` reads them again with the parameter, updates the parameter from the
   unrounded statistics, and stores the rounded ones.

Bytes per parameter, parameter and gradient in half: 6 read, then 8 read and 6 written; no
temporary of the size of the parameter exists.

N are the elements of a slice, P the programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import ADAM_BLOCK, ADAM_BLOCKS, ADAM_PROGRAMS
from ._runtime import FLOAT_DTYPES, FP32, check_tensor, checked, device_guard
from ._sizes import cdiv, next_power_of_2

_FLOATS = "float64", "float32", "float16", "bfloat16"
_TYPES = {getattr(torch, name): getattr(tl, name) for name in _FLOATS}


@triton.jit
def _load_scales(avg_scale_ptr, sq_scale_ptr, grad_multiplier_ptr, pid_s):
    """Return the factors of a slice's stored statistics and of the gradient."""
    avg_scale, sq_scale = tl.load(avg_scale_ptr + pid_s), tl.load(sq_scale_ptr + pid_s)
    return avg_scale, sq_scale, tl.load(grad_multiplier_ptr)


@triton.jit
def _new_statistics(grad_ptr, avg_ptr, sq_ptr, offs, mask, scales, betas):
    """Return the new exp_avg and exp_avg_sq of one block in fp32.

    Betas are beta1, beta2 and 1 minus each, rounded once: taken from an fp32 beta2 of 0.999 here,
    they would be off by 1e-5.
    """
    avg_scale, sq_scale, grad_multiplier = scales
    beta1, beta2, grad_weight, square_weight = betas
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32) * grad_multiplier
    avg = tl.load(avg_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    sq = tl.load(sq_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    new_avg = avg * avg_scale * beta1 + g * grad_weight
    new_sq = sq * sq_scale * beta2 + g * g * square_weight
    return new_avg, new_sq


@triton.jit
def _finite_bits(x):
    """Return the finite magnitudes of a block as the bits of fp32 numbers, 0 for the others."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def _scale_of_bits(bits):
    """Return ``scale_of_max`` of the fp32 number with these bits, and its inverse.

    Both are normal numbers; made from bits, since a division may be approximate on a GPU.
    """
    exponent = tl.where(bits > 0, tl.maximum((bits >> 23) - 14, 1), 127)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _store_block(param_ptr, avg_ptr, sq_ptr, offs, mask, avg, sq, update, inverses):
    """Update a block of the parameter, and store its new statistics over their scales."""
    step_size, decay, eps = update
    avg_inverse, sq_inverse = inverses
    param = tl.load(param_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    param -= decay * param
    param -= step_size * tl.div_rn(avg, tl.sqrt_rn(sq) + eps)
    tl.store(param_ptr + offs, param.to(param_ptr.dtype.element_ty), mask=mask)

    # 2**-14 is fp16's smallest normal number, 2**-24 the distance of its subnormal numbers:
    # there exp_avg_sq is rounded up, never to zero.
    avg *= avg_inverse
    sq *= sq_inverse
    sq = tl.where(sq < 2.0**-14, tl.ceil(sq * 2.0**24) * 2.0**-24, sq)
    tl.store(avg_ptr + offs, avg.to(tl.float16), mask=mask)
    tl.store(sq_ptr + offs, sq.to(tl.float16), mask=mask)


@triton.jit
def _adam16_max_kernel(
    max_bits_ptr,  # (2, Q, programs) int32 - output: maxima of exp_avg and of exp_avg_sq
    grad_ptr,  # (Q, N) float
    avg_ptr,  # (Q, N) fp16 - exp_avg
    sq_ptr,  # (Q, N) fp16 - exp_avg_sq
    avg_scale_ptr,  # (Q,) fp32
    sq_scale_ptr,  # (Q,) fp32
    grad_multiplier_ptr,  # () fp32
    num_elements,  # N, of a parameter: the same at each step
    beta1,
    beta2,
    grad_weight,  # 1 - beta1
    square_weight,  # 1 - beta2
    BLOCK: tl.constexpr,
):
    """Grid (n, Q); program p of a part takes the blocks p, p + n, p + 2 n, ...

    Example: grad [[1, -2]], both statistics 0, beta1 = beta2 = 1/2, P = 1
    -> the bits of 1.0 and of 2.0.
    """
    pid_p = tl.program_id(0).to(tl.int64)
    pid_s = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    scales = _load_scales(avg_scale_ptr, sq_scale_ptr, grad_multiplier_ptr, pid_s)
    betas = (beta1, beta2, grad_weight, square_weight)
    avg_max = tl.zeros([BLOCK], tl.int32)
    sq_max = tl.zeros([BLOCK], tl.int32)
    for start in range(pid_p * BLOCK, num_elements, programs * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_elements
        offs += pid_s * num_elements
        avg, sq = _new_statistics(grad_ptr, avg_ptr, sq_ptr, offs, mask, scales, betas)
        avg_max = tl.maximum(avg_max, _finite_bits(avg))
        sq_max = tl.maximum(sq_max, _finite_bits(sq))
    slot = pid_s * programs + pid_p
    tl.store(max_bits_ptr + slot, tl.max(avg_max, axis=0))
    tl.store(max_bits_ptr + tl.num_programs(1) * programs + slot, tl.max(sq_max, axis=0))


@triton.jit
def _adam16_step_kernel(
    new_avg_scale_ptr,  # (Q,) fp32 - output
    new_sq_scale_ptr,  # (Q,) fp32 - output
    param_ptr,  # (Q, N) float - updated in place
    grad_ptr,  # (Q, N) float
    avg_ptr,  # (Q, N) fp16 - exp_avg, updated in place
    sq_ptr,  # (Q, N) fp16 - exp_avg_sq, updated in place
    avg_scale_ptr,  # (Q,) fp32 - scales the statistics were stored with
    sq_scale_ptr,  # (Q,) fp32
    max_bits_ptr,  # (2, Q, programs) int32 - maxima of the new statistics
    grad_multiplier_ptr,  # () fp32
    num_elements,  # N, of a parameter: the same at each step
    num_programs,  # P of the maxima
    step_size,  # lr * sqrt(1 - beta2^t) / (1 - beta1^t)
    decay,  # lr * weight_decay
    beta1,
    beta2,
    grad_weight,  # 1 - beta1
    square_weight,  # 1 - beta2
    eps,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (cdiv(N, BLOCK * BLOCKS), Q).

    Example: param [[1]], grad [[2]], both statistics 0, beta1 = beta2 = 1/2, step_size 1, no decay,
    eps 0 -> exp_avg 1 and exp_avg_sq 2, param [[1 - 1 / sqrt(2)]]; stored as 2^14 with the scales
    2^-14 and 2^-13.
    """
    pid_n = tl.program_id(0).to(tl.int64)
    pid_s = tl.program_id(1).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < num_programs
    maxima_ptr = max_bits_ptr + pid_s * num_programs + offs_p
    avg_bits = tl.load(maxima_ptr, mask=mask_p, other=0)
    sq_bits = tl.load(maxima_ptr + tl.num_programs(1).to(tl.int64) * num_programs, mask_p, other=0)
    new_avg_scale, avg_inverse = _scale_of_bits(tl.max(avg_bits, axis=0))
    new_sq_scale, sq_inverse = _scale_of_bits(tl.max(sq_bits, axis=0))
    scales = _load_scales(avg_scale_ptr, sq_scale_ptr, grad_multiplier_ptr, pid_s)
    betas = (beta1, beta2, grad_weight, square_weight)
    for block in range(0, BLOCKS):
        offs = (pid_n * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < num_elements
        offs += pid_s * num_elements
        avg, sq = _new_statistics(grad_ptr, avg_ptr, sq_ptr, offs, mask, scales, betas)
        update = (step_size, decay, eps)
        inverses = (avg_inverse, sq_inverse)
        _store_block(param_ptr, avg_ptr, sq_ptr, offs, mask, avg, sq, update, inverses)
    if pid_n == 0:
        tl.store(new_avg_scale_ptr + pid_s, new_avg_scale)
        tl.store(new_sq_scale_ptr + pid_s, new_sq_scale)


@triton.jit
def _adam16_small_kernel(
    table_ptr,  # (S, 7) int64 - addresses of param, grad, both statistics, both scales; and N
    grad_multiplier_ptr,  # () fp32
    step_size,  # lr * sqrt(1 - beta2^t) / (1 - beta1^t)
    decay,  # lr * weight_decay
    beta1,
    beta2,
    grad_weight,  # 1 - beta1
    square_weight,  # 1 - beta2
    eps,
    PARAM: tl.constexpr,  # types of the parameters and of the gradients
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S,); a program makes the whole step of one slice, of whichever parameter.

    Example: one slice with the numbers of :func:`_adam16_step_kernel`: the same results.
    """
    table_ptr += tl.program_id(0).to(tl.int64) * 7
    param_ptr = tl.load(table_ptr).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(table_ptr + 1).to(tl.pointer_type(GRAD))
    avg_ptr = tl.load(table_ptr + 2).to(tl.pointer_type(tl.float16))
    sq_ptr = tl.load(table_ptr + 3).to(tl.pointer_type(tl.float16))
    avg_scale_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float32))
    sq_scale_ptr = tl.load(table_ptr + 5).to(tl.pointer_type(tl.float32))
    num_elements = tl.load(table_ptr + 6)
    scales = _load_scales(avg_scale_ptr, sq_scale_ptr, grad_multiplier_ptr, 0)
    betas = (beta1, beta2, grad_weight, square_weight)
    avg_max = tl.zeros([BLOCK], tl.int32)
    sq_max = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_elements, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_elements
        avg, sq = _new_statistics(grad_ptr, avg_ptr, sq_ptr, offs, mask, scales, betas)
        avg_max = tl.maximum(avg_max, _finite_bits(avg))
        sq_max = tl.maximum(sq_max, _finite_bits(sq))
    new_avg_scale, avg_inverse = _scale_of_bits(tl.max(avg_max, axis=0))
    new_sq_scale, sq_inverse = _scale_of_bits(tl.max(sq_max, axis=0))
    for start in range(0, num_elements, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_elements
        avg, sq = _new_statistics(grad_ptr, avg_ptr, sq_ptr, offs, mask, scales, betas)
        update = (step_size, decay, eps)
        inverses = (avg_inverse, sq_inverse)
        _store_block(param_ptr, avg_ptr, sq_ptr, offs, mask, avg, sq, update, inverses)
    tl.store(avg_scale_ptr, new_avg_scale)
    tl.store(sq_scale_ptr, new_sq_scale)


class _State(NamedTuple):
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor

    def checked(self) -> _State:
        """Return the state with a contiguous gradient, or raise ValueError for a wrong tensor."""
        shape, device = tuple(self.param.shape), self.param.device
        check_tensor("param", self.param, shape, FLOAT_DTYPES, device)
        grad = checked("grad", self.grad, shape, (*FLOAT_DTYPES, torch.float64), device)
        for name in ("exp_avg", "exp_avg_sq"):
            check_tensor(name, getattr(self, name), shape, (torch.float16,), device)
            scale = getattr(self, f"{name}_scale")
            check_tensor(f"{name}_scale", scale, shape[:1] if scale.dim() else (), FP32, device)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} {shape} must be contiguous: it is updated in place")
        return self._replace(grad=grad)

    @property
    def num_slices(self) -> int:
        """Q."""
        return max(self.exp_avg_scale.numel(), 1)

    @property
    def num_elements(self) -> int:
        """N."""
        return self.param.numel() // self.num_slices

    def addresses(self) -> list[tuple[int, ...]]:
        """Return a row of the table of :func:`_adam16_small_kernel` for each slice."""
        N = self.num_elements
        whole = [(x.data_ptr(), x.element_size() * N) for x in self[:4]]
        scales = [(x.data_ptr(), x.element_size()) for x in self[4:]]
        return [
            (*(start + stride * q for start, stride in (*whole, *scales)), N)
            for q in range(self.num_slices)
        ]


def adam16_steps_(
    states: Sequence[Sequence[Tensor]], *, grad_multiplier: Tensor, **numbers: float
) -> None:
    """Apply ``adam16_steps_`` of ``backends.torch`` in one launch."""
    checked_states = [_State(*state).checked() for state in states]
    rows = [row for state in checked_states for row in state.addresses()]
    first = checked_states[0]
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=first.param.is_cuda)
    table = table.to(first.param.device, non_blocking=True)  # from pinned memory: nobody waits
    with device_guard(first.param):
        _adam16_small_kernel[(len(rows),)](
            table,
            grad_multiplier,
            *_numbers(**numbers),
            PARAM=_TYPES[first.param.dtype],
            GRAD=_TYPES[first.grad.dtype],
            BLOCK=ADAM_BLOCK,
            num_warps=8,
        )


def adam16_maxima(*tensors: Tensor, beta1: float, beta2: float, grad_multiplier: Tensor) -> Tensor:
    """Compute ``adam16_maxima`` of ``backends.torch`` (same arguments and results)."""
    state = _State(*tensors).checked()
    if state.param.numel() == 0:
        return torch.zeros((2, state.num_slices), device=state.param.device)
    return _max_bits(state, beta1, beta2, grad_multiplier).amax(-1).view(torch.float32)


def adam16_step_(
    *tensors: Tensor, grad_multiplier: Tensor, maxima: Tensor | None = None, **numbers: float
) -> tuple[Tensor, Tensor]:
    """Apply ``adam16_step_`` of ``backends.torch`` (same arguments, results, rounding)."""
    state = _State(*tensors).checked()
    scales = state[-2:]
    if state.param.numel() == 0:
        return torch.ones_like(scales[0]), torch.ones_like(scales[1])
    new_scales = torch.empty_like(scales[0]), torch.empty_like(scales[1])
    if maxima is None:
        max_bits = _max_bits(state, numbers["beta1"], numbers["beta2"], grad_multiplier)
    else:
        shape = (2, state.num_slices)
        maxima = checked("maxima", maxima, shape, FP32, state.param.device)
        max_bits = maxima.view(torch.int32).unsqueeze(-1)
    num_programs = max_bits.shape[-1]
    blocks = cdiv(state.num_elements, ADAM_BLOCK * ADAM_BLOCKS)
    with device_guard(state.param):
        _adam16_step_kernel[(blocks, state.num_slices)](
            *new_scales,
            *state,
            max_bits,
            grad_multiplier,
            state.num_elements,
            num_programs,
            *_numbers(**numbers),
            BLOCK=ADAM_BLOCK,
            BLOCK_P=next_power_of_2(num_programs),
            BLOCKS=ADAM_BLOCKS,
            num_warps=8,
        )
    return new_scales


def _numbers(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> tuple[float, ...]:
    """Return the numbers of a step, from ``step_size`` to ``eps``, in the order of the kernels."""
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return step_size, lr * weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, eps


def _max_bits(state: _State, beta1: float, beta2: float, grad_multiplier: Tensor) -> Tensor:
    """Return the bits of the maxima of the new statistics, [2, Q, n] int32, one per program."""
    slices, elements = state.num_slices, state.num_elements
    num_programs = min(cdiv(elements, ADAM_BLOCK), max(1, ADAM_PROGRAMS // slices))
    shape = (2, slices, num_programs)
    max_bits = torch.empty(shape, dtype=torch.int32, device=state.param.device)
    with device_guard(state.param):
        _adam16_max_kernel[(num_programs, slices)](
            max_bits,
            *state[1:],
            grad_multiplier,
            elements,
            *(beta1, beta2, 1 - beta1, 1 - beta2),
            BLOCK=ADAM_BLOCK,
            num_warps=8,
        )
    return max_bits
