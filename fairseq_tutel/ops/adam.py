"""Operator of Adam's step with fp16 statistics.

A plain function and no registered operator: it runs outside of graphs and of autograd, once per
parameter, where a registered one would cost more than its two launches.
"""

from __future__ import annotations

from torch import Tensor

from ..backends import torch as torch_backend
from .backend import implementation


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
    """Largest finite magnitudes of the statistics that :func:`adam16_step_` is going to store.

    For a parameter of which every rank has a part: the maximum over the ranks, given to the step,
    makes the scales those of the whole parameter.

    Args:
        See :func:`adam16_step_`; nothing is changed.

    Returns:
        [2, S] fp32, of ``exp_avg`` and of ``exp_avg_sq``, for the S scales.
    """
    return implementation("adam16_maxima", param)(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        exp_avg_scale,
        exp_avg_sq_scale,
        beta1=beta1,
        beta2=beta2,
        grad_multiplier=grad_multiplier,
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
    maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of Adam (fairseq's rule) on one tensor; statistics kept in fp16.

    The rule, and what rounding does to it: ``backends/torch/adam.py``.

    Args:
        param: any shape, fp32, fp16 or bf16 (fp64 on the torch backend), contiguous; updated in
            place.
        grad: shape of param, any floating dtype.
        exp_avg, exp_avg_sq: shape of param, fp16, contiguous; updated in place.
        exp_avg_scale, exp_avg_sq_scale: [] (whole tensor) or [e] (per index of dim 0), fp32.
        step: number of this step, from 1.
        grad_multiplier: [] fp32 on param's device; the gradient is multiplied by it first.
        maxima: [2, S] fp32, of :func:`adam16_maxima` over all parts of the parameter of which this
            is one; None where it is the whole one.

    Returns:
        The new (exp_avg_scale, exp_avg_sq_scale), in the shapes they came in.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, on the Triton backend.
    """
    return implementation("adam16_step_", param)(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        exp_avg_scale,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_multiplier=grad_multiplier,
        maxima=maxima,
    )


def finite_max(x_SN: Tensor) -> Tensor:
    """Largest finite magnitude of each row as fp32 [S]; 0 where there is none."""
    return torch_backend.finite_max(x_SN)


def quantize_(out_SN: Tensor, x_SN: Tensor, *, round_up: bool, max_S: Tensor) -> Tensor:
    """Write a statistic into fp16 slices and return their scales, as a step does.

    Args:
        out_SN: [S, N] fp16, overwritten.
        x_SN: [S, N] fp32 or fp64. Used as scratch space.
        round_up: round upwards in fp16's subnormal range (for ``exp_avg_sq``, x >= 0).
        max_S: [S] fp32, of :func:`finite_max`.
    """
    return torch_backend.quantize_(out_SN, x_SN, round_up=round_up, max_S=max_S)
