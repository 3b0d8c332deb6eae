"""Operator of the gate's product on a CPU.

Legend: T tokens, M model dim, E experts.
"""

import torch
from torch import Tensor

from ..backends import torch as torch_backend


@torch.library.custom_op("fairseq_tutel::gate_logits", mutates_args=())
def _gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    return torch_backend.gate_logits_fwd(x, weight)


@_gate_logits.register_fake
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("fairseq_tutel::gate_logits_bwd", mutates_args=())
def _gate_logits_bwd(
    d_logits: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return torch_backend.gate_logits_bwd(
        d_logits, x, weight, needs_x=needs_x, needs_weight=needs_weight
    )


@_gate_logits_bwd.register_fake
def _(d_logits, x, weight, needs_x, needs_weight):
    d_x = x.new_empty(x.shape if needs_x else (0,))
    return d_x, x.new_empty(weight.shape if needs_weight else (0,))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_logits):
    needs_x, needs_weight = ctx.needs_input_grad
    d_x, d_weight = _gate_logits_bwd(d_logits, *ctx.saved_tensors, needs_x, needs_weight)
    return d_x if needs_x else None, d_weight if needs_weight else None


_gate_logits.register_autograd(_backward, setup_context=_setup)


def gate_logits(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """``x @ weight.T`` on a CPU (:func:`~fairseq_tutel.ops.on_cpu_threads`), narrow in E.

    Args:
        x_TM: (T, M); differentiable.
        weight_EM: (E, M), of the same dtype; differentiable.

    Returns:
        (T, E).

    Raises:
        ValueError: wrong shapes or dtypes, or no CPU.
    """
    if x_TM.device.type != "cpu":
        raise ValueError(f"gate_logits is for CPUs, the tokens are on {x_TM.device}")
    if x_TM.dim() != 2 or weight_EM.dim() != 2 or x_TM.shape[1] != weight_EM.shape[1]:
        raise ValueError(
            f"tokens {tuple(x_TM.shape)} and weight {tuple(weight_EM.shape)} must be (tokens, "
            "model_dim) and (experts, model_dim)"
        )
    if x_TM.dtype != weight_EM.dtype:
        raise ValueError(f"tokens are {x_TM.dtype}, the weight is {weight_EM.dtype}")
    return _gate_logits(x_TM, weight_EM)
