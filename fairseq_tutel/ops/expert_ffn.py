"""Operator of the experts' whole feed-forward network, where one pass over blocks is faster.

Legend: e local experts, N rows per expert, R rows, M model dim, F hidden dim.
"""

from typing import Optional

import torch
from torch import Tensor

from ..backends import torch as torch_backend
from .activation import check_activation, dropout_seed


@torch.library.custom_op("fairseq_tutel::expert_ffn", mutates_args=())
def _expert_ffn(
    rows: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
    offsets: Optional[Tensor], seed: Optional[Tensor], activation: str,
    activation_dropout_p: float, dropout_p: float, keep_hidden: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch_backend.expert_ffn_fwd(
        rows, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation=activation, offsets=offsets,
        dropout_p=(activation_dropout_p, dropout_p), seed=seed, keep_hidden=keep_hidden,
    )  # fmt: skip


@_expert_ffn.register_fake
def _(rows, fc1_weight, fc1_bias, fc2_weight, fc2_bias, offsets, seed, activation,
      activation_dropout_p, dropout_p, keep_hidden):  # fmt: skip
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    num_rows = rows.shape[0] if offsets is not None else rows.shape[0] * rows.shape[1]
    return out, rows.new_empty((num_rows if keep_hidden else 0, fc1_weight.shape[1]))


@torch.library.custom_op("fairseq_tutel::expert_ffn_bwd", mutates_args=())
def _expert_ffn_bwd(
    d_out: Tensor, rows: Tensor, saved: Tensor, fc1_weight: Tensor, fc1_bias: Tensor,
    fc2_weight: Tensor, fc2_bias: Tensor, offsets: Optional[Tensor], seed: Optional[Tensor],
    activation: str, activation_dropout_p: float, dropout_p: float, needs_rows: bool,
    needs_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return torch_backend.expert_ffn_bwd(
        d_out, rows, saved, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation=activation,
        offsets=offsets, dropout_p=(activation_dropout_p, dropout_p), seed=seed,
        needs_rows=needs_rows, needs_params=needs_params,
    )  # fmt: skip


@_expert_ffn_bwd.register_fake
def _(d_out, rows, saved, fc1_weight, fc1_bias, fc2_weight, fc2_bias, offsets, seed, activation,
      activation_dropout_p, dropout_p, needs_rows, needs_params):  # fmt: skip
    params = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    d_params = (x.new_empty(x.shape if needs_params else (0,)) for x in params)
    return rows.new_empty(rows.shape if needs_rows else (0,)), *d_params


def _setup(ctx, inputs, output):
    *tensors, offsets, seed, activation, activation_p, dropout_p, _ = inputs
    ctx.options = activation, activation_p, dropout_p
    ctx.mark_non_differentiable(output[1])
    # or the backward pass would be handed zeros of the size of what was saved
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1], offsets, seed)


def _backward(ctx, d_out, d_saved):
    if d_out is None:
        return (None,) * 11
    rows, w1, b1, w2, b2, saved, offsets, seed = ctx.saved_tensors
    needs_rows, *needs = ctx.needs_input_grad[:5]
    grads = _expert_ffn_bwd(
        d_out, rows, saved, w1, b1, w2, b2, offsets, seed, *ctx.options, needs_rows, any(needs)
    )
    wanted = (g if n else None for g, n in zip(grads, (needs_rows, *needs), strict=True))
    return *wanted, *(None,) * 6


_expert_ffn.register_autograd(_backward, setup_context=_setup)


def expert_ffn(
    rows: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor, *,
    activation: str, offsets: Tensor | None = None, activation_dropout_p: float = 0.0,
    dropout_p: float = 0.0, seed: Tensor | int | None = None,
) -> Tensor:  # fmt: skip
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    For CPUs (:func:`~fairseq_tutel.ops.on_cpu_threads`). Keeps one buffer of R x F numbers for the
    backward pass, none without gradients. All tensor arguments but ``offsets`` and ``seed`` are
    differentiable.

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F).
        fc2_weight, fc2_bias: (e, M, F), (e, M).
        activation: a name that :func:`~fairseq_tutel.ops.bias_act` knows.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        activation_dropout_p, dropout_p: probabilities after the activation and after fc2.
        seed: of the dropout masks, an int or an int64 scalar tensor; drawn from torch's generator
            when None.

    Returns:
        Like rows.

    Raises:
        ValueError: unknown activation, a probability out of range, wrong shapes, or no CPU.
    """
    num_experts, hidden_dim, model_dim = fc1_weight.shape
    for p in (activation_dropout_p, dropout_p):
        check_activation(activation, p)
    if rows.device.type != "cpu":
        raise ValueError(f"expert_ffn is for CPUs, the rows are on {rows.device}")
    if rows.dim() != (3 if offsets is None else 2) or rows.shape[-1] != model_dim:
        raise ValueError(
            f"rows must be (experts, rows, {model_dim}), or (rows, {model_dim}) with offsets; got "
            f"{tuple(rows.shape)} with offsets {offsets is not None}"
        )
    experts = rows.shape[0] if offsets is None else offsets.shape[0]
    for name, value, shape in (
        ("fc1_weight", fc1_weight, (experts, hidden_dim, model_dim)),
        ("fc1_bias", fc1_bias, (experts, hidden_dim)),
        ("fc2_weight", fc2_weight, (experts, model_dim, hidden_dim)),
        ("fc2_bias", fc2_bias, (experts, model_dim)),
    ):
        if value.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(value.shape)}")
    if offsets is not None and offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32, got {offsets.dtype}")
    tensors = (rows, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    seed = dropout_seed(max(activation_dropout_p, dropout_p), seed, rows.device)
    keep_hidden = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, _ = _expert_ffn(
        *tensors, offsets, seed, activation, activation_dropout_p, dropout_p, keep_hidden
    )
    return out
