"""Operator of the experts' whole feed-forward network."""

from typing import Optional

import torch
from torch import Tensor

from .activation import check_activation, dropout_seed
from .backend import backend_for, implementation


@torch.library.custom_op("fairseq_tutel::expert_ffn", mutates_args=())
def _expert_ffn(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    offsets: Optional[Tensor],
    seed: Optional[Tensor],
    activation: str,
    activation_dropout_p: float,
    dropout_p: float,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return implementation("expert_ffn_fwd", rows)(
        rows,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        activation=activation,
        offsets=offsets,
        dropout_p=(activation_dropout_p, dropout_p),
        seed=seed,
        keep_hidden=keep_hidden,
    )


def _keeps_active(rows: Tensor) -> bool:
    """Whether the values after the activation are kept too; a CPU recomputes them in the cache."""
    return rows.device.type != "cpu" or backend_for(rows.device) == "triton"


@_expert_ffn.register_fake
def _(
    rows,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    offsets,
    seed,
    activation,
    activation_dropout_p,
    dropout_p,
    keep_hidden,
):
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    num_rows = rows.shape[0] if offsets is not None else rows.shape[0] * rows.shape[1]
    hidden_dim = fc1_weight.shape[1]
    hidden = rows.new_empty((num_rows if keep_hidden else 0, hidden_dim))
    active = rows.new_empty((num_rows if keep_hidden and _keeps_active(rows) else 0, hidden_dim))
    return out, hidden, active


@torch.library.custom_op("fairseq_tutel::expert_ffn_bwd", mutates_args=())
def _expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    hidden: Tensor,
    active: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    offsets: Optional[Tensor],
    seed: Optional[Tensor],
    activation: str,
    activation_dropout_p: float,
    dropout_p: float,
    needs_rows: bool,
    needs_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return implementation("expert_ffn_bwd", rows)(
        d_out,
        rows,
        hidden,
        active,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        activation=activation,
        offsets=offsets,
        dropout_p=(activation_dropout_p, dropout_p),
        seed=seed,
        needs_rows=needs_rows,
        needs_params=needs_params,
    )


@_expert_ffn_bwd.register_fake
def _(
    d_out,
    rows,
    hidden,
    active,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    offsets,
    seed,
    activation,
    activation_dropout_p,
    dropout_p,
    needs_rows,
    needs_params,
):
    params = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    d_params = (x.new_empty(x.shape if needs_params else (0,)) for x in params)
    return rows.new_empty(rows.shape if needs_rows else (0,)), *d_params


def _setup(ctx, inputs, output):
    rows, *params, offsets, seed, activation, activation_p, dropout_p, _ = inputs
    _, hidden, active = output
    ctx.options = activation, activation_p, dropout_p
    ctx.mark_non_differentiable(hidden, active)
    # or the backward pass would be handed zeros of the size of what was saved
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, hidden, active, *params, offsets, seed)


def _backward(ctx, d_out, d_hidden, d_active):
    if d_out is None:
        return (None,) * 11
    needs_rows, *needs = ctx.needs_input_grad[:5]
    grads = _expert_ffn_bwd(d_out, *ctx.saved_tensors, *ctx.options, needs_rows, any(needs))
    wanted = (g if n else None for g, n in zip(grads, (needs_rows, *needs), strict=True))
    return *wanted, *(None,) * 6


_expert_ffn.register_autograd(_backward, setup_context=_setup)


def _check(rows: Tensor, params: dict[str, Tensor], offsets: Tensor | None) -> None:
    num_experts, hidden_dim, model_dim = params["fc1_weight"].shape
    if rows.dim() != (3 if offsets is None else 2) or rows.shape[-1] != model_dim:
        raise ValueError(
            f"rows must be (experts, rows, {model_dim}), or (rows, {model_dim}) with offsets; got "
            f"{tuple(rows.shape)} with offsets {offsets is not None}"
        )
    experts = rows.shape[0] if offsets is None else offsets.shape[0]
    shapes = {
        "fc1_weight": (experts, hidden_dim, model_dim),
        "fc1_bias": (experts, hidden_dim),
        "fc2_weight": (experts, model_dim, hidden_dim),
        "fc2_bias": (experts, model_dim),
    }
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(params[name].shape)}")
    if offsets is not None and offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32, got {offsets.dtype}")


def expert_ffn(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    activation_dropout_p: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
) -> Tensor:
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    For the backward pass a CPU keeps one buffer of R x F numbers, a GPU two; none is kept without
    gradients. All tensor arguments but ``offsets`` and ``seed`` are differentiable, and gradients
    have the memory layout of what they belong to.

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F).
        fc2_weight, fc2_bias: (e, M, F), (e, M).
        activation: gelu, gelu_accurate / gelu_fast (tanh form), relu, relu_squared, silu / swish,
            tanh or linear, as fairseq names them; ``gelu`` is the exact (erf) one.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero, and their
            gradient is unspecified.
        activation_dropout_p, dropout_p: probabilities after the activation and after fc2.
        seed: of the dropout masks, an int or an int64 scalar tensor; drawn from torch's generator
            of the rows' device when None, so that a replayed CUDA graph draws new ones.

    Returns:
        Like rows.

    Raises:
        ValueError: unknown activation, a probability out of range, wrong shapes.
    """
    for p in (activation_dropout_p, dropout_p):
        check_activation(activation, p)
    params = {
        "fc1_weight": fc1_weight,
        "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight,
        "fc2_bias": fc2_bias,
    }
    _check(rows, params, offsets)
    tensors = (rows, *params.values())
    seed = dropout_seed(max(activation_dropout_p, dropout_p), seed, rows.device)
    keep_hidden = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, _, _ = _expert_ffn(
        *tensors, offsets, seed, activation, activation_dropout_p, dropout_p, keep_hidden
    )
    return out
