"""Operator of Adam's step with fp16 statistics.

The functions are not registered with torch. They run outside of graphs and autograd, once per
parameter, and a registered operator would cost more than its two launches.
"""

from collections.abc import Sequence

from torch import Tensor

from .backend import implementation


def adam16_maxima(param: Tensor, *tensors: Tensor, **options) -> Tensor:
    """Return the largest finite magnitudes of the statistics that :func:`adam16_step_` will store.

    Give the step their maximum over the ranks that hold parts of a parameter. Its scales are then
    those of the whole parameter. They are [2, Q] fp32, of ``exp_avg`` and of ``exp_avg_sq``, for
    the Q scales. ``options`` are beta1, beta2 and grad_multiplier of the step.
    """
    return implementation("adam16_maxima", param)(param, *tensors, **options)


def adam16_step_(param: Tensor, *tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Make one step of Adam (fairseq's rule) on one tensor, with fp16 statistics.

    ``backends/torch/adam.py`` states the rule and the effect of rounding.

    Args:
        param: any shape, fp32, fp16 or bf16 (fp64 on the torch backend), contiguous; updated in
            place.
        tensors: grad, shape of param, any floating dtype; exp_avg and exp_avg_sq, shape of param,
            fp16, contiguous, updated in place; exp_avg_scale and exp_avg_sq_scale, [] (whole
            tensor) or [e] (per index of dim 0), fp32.
        options: the numbers lr, beta1, beta2, eps, weight_decay; step, the number of this step,
            from 1; grad_multiplier, [] fp32 on param's device, by which the gradient is multiplied
            first; maxima, [2, Q] fp32 of :func:`adam16_maxima` over all parts of the parameter, or
            None if this is the whole parameter.

    Returns:
        The new (exp_avg_scale, exp_avg_sq_scale), in the shapes they came in.
    """
    return implementation("adam16_step_", param)(param, *tensors, **options)


def adam16_steps_(states: Sequence[Sequence[Tensor]], **options) -> None:
    """Make the steps of several small tensors, on a GPU in one launch.

    ``states`` are param, grad, exp_avg, exp_avg_sq and both scales of each tensor, as of
    :func:`adam16_step_`; all of one device, params of one dtype, grads of one dtype. Scales are
    updated in place, too. No tensor is empty. ``options`` are those of a step but ``maxima``.
    """
    implementation("adam16_steps_", states[0][0])(states, **options)
