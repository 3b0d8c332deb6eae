"""Adam with fp16 statistics: the torch twin of ``backends/triton/adam.py``.

A statistic x (``exp_avg`` or ``exp_avg_sq``) of a parameter is stored as fp16 values y and one
fp32 scale s per slice, x = y * s. A slice is the whole tensor, or one index of dim 0 for stacked
expert weights, so the state of one expert can be cut out without touching a bit of it. The idea
of scaled fp16 statistics is that of fairseq's ``FusedAdamV1`` (after Jukebox, Dhariwal et al.,
2020); what differs here is that

- s is a power of two, so scaling is exact and only the rounding to fp16 is an error;
- ``exp_avg_sq`` is rounded upwards where fp16 is subnormal, so it is never understated there.
  Rounded to nearest, a small second moment would become zero while its first moment survives,
  and the update would be ``exp_avg / eps``.

Error of one store, for the largest magnitude X of the slice (X / s lies in [2**14, 2**15)):

- relative error at most 2**-11 where \\|x\\| >= 2**-28 X;
- below that, ``exp_avg`` is off by at most 2**-39 X, and ``exp_avg_sq`` is overstated by less than
  2**-38 X.

Each store's error fades as the moving average does: after many steps the statistic is off by at
most max_i e_i / (1 - beta), e_i being the error of the store i steps ago. Relative to its largest
recent value that is 0.5 % for beta1 = 0.9, 2.5 % for beta2 = 0.98 and 49 % for beta2 = 0.999, where
an increment below half a unit is lost; an update sees half of the second moment's. The
overstatement of small ``exp_avg_sq`` is like an additional eps of 2**-19 / sqrt(1 - beta2) times
the root of X. Choose beta2 <= 0.99 with fp16 statistics, as Meta's runs did (0.98).

Non-finite gradients behave as in fp32 Adam: their elements become inf or NaN in the statistics and
NaN or unchanged in the parameter, all others are computed as if they were not there (the scale is
taken over finite values only). A slice of zeros has scale 1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The largest value of a slice is stored in [2**14, 2**15): half of fp16's range is left free, so
# that rounding up can never reach inf.
TARGET_EXPONENT = 14
# fp16: smallest normal value, and the distance of subnormal values.
HALF_SMALLEST_NORMAL = 2.0**-14
HALF_SUBNORMAL_STEP = 2.0**-24


def scale_of_max(max_Q: Tensor) -> Tensor:
    """Return the scale of each slice, [Q] fp32, for its largest magnitude, finite fp32.

    Scales are powers of two s, at least 2**-126, with max / s in [2**14, 2**15); 1 for zero.
    """
    exponent_Q = max_Q.view(torch.int32) >> 23
    scale_Q = ((exponent_Q - TARGET_EXPONENT).clamp(min=1) << 23).view(torch.float32)
    return torch.where(max_Q > 0, scale_Q, 1.0)


def finite_max(x_QN: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row as fp32 [Q]; 0 if a row has none."""
    if x_QN.shape[1] == 0:
        return x_QN.new_zeros(x_QN.shape[0], dtype=torch.float32)
    magnitude_QN = x_QN.abs()
    max_Q = magnitude_QN.amax(1).float()
    if not bool(torch.isfinite(max_Q).all()):
        max_Q = magnitude_QN.masked_fill_(~torch.isfinite(magnitude_QN), 0.0).amax(1).float()
    return max_Q


def quantize_(
    out_QN: Tensor, x_QN: Tensor, *, round_up: bool, max_Q: Tensor | None = None
) -> Tensor:
    """Write x to fp16 ``out_QN`` and return its scales, [Q] fp32; see the module's docstring.

    Args:
        out_QN: [Q, N] fp16, overwritten.
        x_QN: [Q, N] fp32 or fp64. Used as scratch space.
        round_up: round upwards in fp16's subnormal range (for ``exp_avg_sq``, x >= 0).
        max_Q: [Q] fp32, the largest finite magnitudes of the slices that x is a part of; None
            (default) takes x for the whole.
    """
    scale_Q = scale_of_max(finite_max(x_QN) if max_Q is None else max_Q)
    x_QN.mul_(scale_Q.reciprocal().unsqueeze(1))
    if round_up:
        raised_QN = (x_QN * (1 / HALF_SUBNORMAL_STEP)).ceil_().mul_(HALF_SUBNORMAL_STEP)
        x_QN = torch.where(x_QN < HALF_SMALLEST_NORMAL, raised_QN, x_QN)
    out_QN.copy_(x_QN)
    return scale_Q


def adam16_maxima(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    *,
    beta1: float,
    beta2: float,
    grad_multiplier: Tensor,
) -> Tensor:
    """Return the largest magnitudes, as :func:`fairseq_tutel.ops.adam16_maxima` does."""
    state = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
    statistics = _new_statistics(grad, state, beta1, beta2, grad_multiplier, param.dtype)
    return torch.stack([finite_max(x_QN) for x_QN in statistics])


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
    maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Make one step of Adam (fairseq's rule) on one tensor, with fp16 statistics.

    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, p = p - lr weight_decay p, and
    p = p - lr sqrt(1 - beta2^step) / (1 - beta1^step) * m / (sqrt(v) + eps) (Kingma and Ba, 2015,
    end of section 2; decoupled decay of Loshchilov and Hutter, 2019). The update uses m and v
    before they are rounded. Arguments and results as of :func:`fairseq_tutel.ops.adam16_step_`.
    """
    slices = max(exp_avg_scale.numel(), 1)
    compute = torch.promote_types(param.dtype, torch.float32)
    state = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
    avg_QN, sq_QN = _new_statistics(grad, state, beta1, beta2, grad_multiplier, param.dtype)
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    param_QN = param.reshape(slices, -1).to(compute)
    if weight_decay != 0:
        param_QN = param_QN.add(param_QN, alpha=-lr * weight_decay)
    param.copy_(param_QN.addcdiv(avg_QN, sq_QN.sqrt().add_(eps), value=-step_size).view_as(param))

    avg_max_Q, sq_max_Q = (None, None) if maxima is None else maxima
    new_avg_scale_Q = quantize_(exp_avg.view(slices, -1), avg_QN, round_up=False, max_Q=avg_max_Q)
    new_sq_scale_Q = quantize_(exp_avg_sq.view(slices, -1), sq_QN, round_up=True, max_Q=sq_max_Q)
    return new_avg_scale_Q.view_as(exp_avg_scale), new_sq_scale_Q.view_as(exp_avg_sq_scale)


def adam16_steps_(states: Sequence[Sequence[Tensor]], **options: Any) -> None:
    """Step several tensors, as :func:`fairseq_tutel.ops.adam16_steps_` does."""
    for tensors in states:
        for scale, new in zip(tensors[4:], adam16_step_(*tensors, **options), strict=True):
            scale.copy_(new)


def _new_statistics(grad, state, beta1, beta2, grad_multiplier, dtype):
    """Return the new exp_avg and exp_avg_sq, [Q, N], unrounded, in the dtype of the arithmetic."""
    exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = state
    slices = max(exp_avg_scale.numel(), 1)
    compute = torch.promote_types(dtype, torch.float32)

    def rows(x: Tensor) -> Tensor:
        return x.reshape(slices, -1).to(compute)

    grad_QN = rows(grad) * grad_multiplier
    avg_QN = rows(exp_avg).mul_(exp_avg_scale.reshape(slices, 1))
    avg_QN.mul_(beta1).add_(grad_QN, alpha=1 - beta1)
    sq_QN = rows(exp_avg_sq).mul_(exp_avg_sq_scale.reshape(slices, 1))
    sq_QN.mul_(beta2).addcmul_(grad_QN, grad_QN, value=1 - beta2)
    return avg_QN, sq_QN
