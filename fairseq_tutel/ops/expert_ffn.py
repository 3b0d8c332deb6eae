"""Operator of the experts' whole feed-forward network, and the network on rows in chunks.

Chunks have plain functions: they are used by the overlap of exchange and experts, which has an
autograd function of its own, and computes weight gradients once, over all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import GATES
from ..backends.torch import ACTIVATIONS
from ._operator import check_indices, check_shape, empty_gradients, operator
from .backend import implementation


def check_activation(activation: str, dropout_p: float) -> None:
    """Raise ValueError for an unknown activation or a dropout probability outside [0, 1)."""
    if activation not in ACTIVATIONS and activation not in GATES:
        raise ValueError(
            f"unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def activate(z_NF: Tensor, activation: str) -> Tensor:
    """Return the hidden values of rows from those before the activation; not differentiable.

    Args:
        z_NF: (N, F), or (N, 2F) of a gated network, the gate's first.
        activation: as of :func:`expert_ffn`.
    """
    function, _ = ACTIVATIONS[GATES.get(activation, activation)]
    gate_NF, *up_NF = z_NF.chunk(2 if activation in GATES else 1, 1)
    gate_NF = gate_NF.contiguous()
    active_NF = function(gate_NF, torch.empty_like(gate_NF))
    return active_NF.mul_(up_NF[0]) if up_NF else active_NF


def dropout_seed(
    dropout_p: float, seed: Tensor | int | None, device: torch.device
) -> Tensor | None:
    """The seed as an int64 scalar tensor, drawn where there is none; None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**31, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        # filled by a kernel: a copy from host memory would wait for all work of the GPU
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed


def _fake_ffn(*inputs):
    rows, fc1_weight, _, fc2_weight, _, offsets, *_, keep_hidden = inputs
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    num_rows = rows.shape[0] if offsets is not None else rows.shape[0] * rows.shape[1]
    kept = num_rows if keep_hidden else 0
    return out, *(rows.new_empty((kept, n)) for n in (fc1_weight.shape[1], fc2_weight.shape[2]))


_PARAMS = "Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias"
_OPTIONS = (
    "Tensor? offsets, Tensor? seed, str activation, float activation_dropout_p, float dropout_p"
)


class FFNOptions(NamedTuple):
    """As :func:`~fairseq_tutel.ops.expert_ffn` has them."""

    activation: str
    dropout_p: tuple[float, float]  # after the activation and after fc2
    # number of the hidden units' part that is computed, where other ranks compute others: ranks
    # whose generators are alike draw unlike masks for unlike parts
    part: int = 0

    def draw_seed(self, device: torch.device) -> Tensor | None:
        """A seed of the masks of one call; None without dropout."""
        seed = dropout_seed(max(self.dropout_p), None, device)
        # two masks are made of each seed, by it and by its successor
        return seed if seed is None or not self.part else seed + 2 * self.part

    def given(self, **more: Tensor | None) -> dict[str, object]:
        """Options of the backends' functions."""
        return {"activation": self.activation, "dropout_p": self.dropout_p, **more}


def _given(offsets, seed, activation, *dropout_p):
    return FFNOptions(activation, dropout_p).given(offsets=offsets, seed=seed)


@operator(
    "expert_ffn",
    _fake_ffn,
    f"(Tensor rows, {_PARAMS}, {_OPTIONS}, bool keep_hidden) -> (Tensor, Tensor, Tensor)",
)
def _expert_ffn(*inputs):
    tensors, options, keep_hidden = inputs[:5], _given(*inputs[5:-1]), inputs[-1]
    forward = implementation("expert_ffn_fwd", tensors[0])
    return forward(*tensors, keep_hidden=keep_hidden, **options)


def _fake_ffn_bwd(*inputs):
    rows, params, (needs_rows, needs_params) = inputs[1], inputs[4:8], inputs[-2:]
    params = [rows.new_empty(0) if x is None else x for x in params]
    return empty_gradients((rows, *params), (needs_rows, *(4 * [needs_params])))


@operator(
    "expert_ffn_bwd",
    _fake_ffn_bwd,
    f"(Tensor d_out, Tensor rows, Tensor hidden, Tensor active, {_PARAMS}, {_OPTIONS}, "
    "bool needs_rows, bool needs_params) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _expert_ffn_bwd(*inputs):
    tensors, options, (needs_rows, needs_params) = inputs[:8], _given(*inputs[8:-2]), inputs[-2:]
    backward = implementation("expert_ffn_bwd", tensors[1])
    return backward(*tensors, needs_rows=needs_rows, needs_params=needs_params, **options)


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


def _check(rows: Tensor, params: dict[str, Tensor | None], offsets: Tensor | None, gated: bool):
    _, model_dim, hidden_dim = params["fc2_weight"].shape
    if rows.dim() != (3 if offsets is None else 2) or rows.shape[-1] != model_dim:
        raise ValueError(
            f"rows must be (experts, rows, {model_dim}), or (rows, {model_dim}) with offsets; got "
            f"{tuple(rows.shape)} with offsets {offsets is not None}"
        )
    experts = rows.shape[0] if offsets is None else offsets.shape[0]
    width = 2 * hidden_dim if gated else hidden_dim
    shapes = ((width, model_dim), (width,), (model_dim, hidden_dim), (model_dim,))
    for (name, param), shape in zip(params.items(), shapes, strict=True):
        if param is None and not gated:
            raise ValueError(f"{name} must be {(experts, *shape)}, got None")
        check_shape(name, param, (experts, *shape))
    if offsets is not None:
        check_indices("offsets", offsets, "experts")


def expert_ffn(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str,
    offsets: Tensor | None = None,
    activation_dropout_p: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
) -> Tensor:
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    For the backward pass two buffers of R x F numbers are kept, none without gradients. All tensor
    arguments but ``offsets`` and ``seed`` are differentiable, and gradients have the memory layout
    of what they belong to.

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F); of a gated network (e, 2F, M), (e, 2F), the gate's
            first.
        fc2_weight, fc2_bias: (e, M, F), (e, M). A gated network may have no biases: None.
        activation: of a gated network swiglu or geglu, ``silu(gate) * up`` or ``gelu(gate) * up``;
            else gelu, gelu_accurate / gelu_fast (tanh form), relu, relu_squared, silu / swish,
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
    names = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    params = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    _check(rows, dict(zip(names, params, strict=True)), offsets, activation in GATES)
    probabilities = (activation_dropout_p, dropout_p)
    seed = dropout_seed(max(probabilities), seed, rows.device)
    keep_hidden = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (rows, *params)
    )
    return _expert_ffn(rows, *params, offsets, seed, activation, *probabilities, keep_hidden)[0]


class FFNChunk(NamedTuple):
    """What the backward pass needs of a chunk."""

    rows: Tensor  # (e, N, M), or (R, M) with offsets
    hidden: Tensor  # of the implementation, before the activation
    active: Tensor  # the same after it
    offsets: Tensor | None  # (e,) int32 end row of each expert, the last of which ends the rows
    seed: Tensor | None  # of the dropout masks


class FFNChunkGradient(NamedTuple):
    """Gradients within a chunk."""

    d_rows: Tensor  # like the rows; of shape (0,) if not needed
    d_out: Tensor  # of the output before its dropout
    d_hidden: Tensor  # (R, F), of the values before the activation
    d_fc1_bias: Tensor
    d_fc2_bias: Tensor


def ffn_chunk(
    rows: Tensor,
    *params: Tensor | None,
    offsets: Tensor | None,
    options: FFNOptions,
    keep_hidden: bool,
) -> tuple[Tensor, FFNChunk]:
    """:func:`~fairseq_tutel.ops.expert_ffn` of a chunk, without autograd.

    Args:
        params: fc1's weight and bias and fc2's, here and below.

    Returns:
        the output, like rows; what :func:`ffn_chunk_bwd` needs, if ``keep_hidden``.
    """
    seed = options.draw_seed(rows.device)
    given = options.given(offsets=offsets, seed=seed)
    forward = implementation("expert_ffn_fwd", rows)
    out, hidden, active = forward(rows, *params, keep_hidden=keep_hidden, **given)
    return out, FFNChunk(rows, hidden, active, offsets, seed)


def ffn_chunk_bwd(
    d_out: Tensor,
    chunk: FFNChunk,
    *params: Tensor | None,
    options: FFNOptions,
    needs_rows: bool = True,
) -> FFNChunkGradient:
    """What has to be known before the gradient of the rows can be sent."""
    given = options.given(offsets=chunk.offsets, seed=chunk.seed)
    backward = implementation("expert_chunk_bwd", d_out)
    return FFNChunkGradient(*backward(d_out, chunk.hidden, *params, needs_rows=needs_rows, **given))


def ffn_chunks_bwd_params(
    chunks: Sequence[FFNChunk],
    gradients: Sequence[FFNChunkGradient],
    *params: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of fc1's weight and bias and of fc2's, summed over all rows of all chunks.

    Args:
        chunks, gradients: in one order.
    """
    d_w1, d_w2 = implementation("expert_chunks_bwd_params", chunks[0].rows)(
        [
            (grad.d_out, grad.d_hidden, chunk.rows, chunk.active)
            for chunk, grad in zip(chunks, gradients, strict=True)
        ],
        [chunk.offsets for chunk in chunks],
    )
    d_b1 = _sum([grad.d_fc1_bias for grad in gradients], params[1])
    d_b2 = _sum([grad.d_fc2_bias for grad in gradients], params[3])
    return d_w1, d_b1, d_w2, d_b2


def _sum(parts, bias):
    if bias is None:
        return None
    acc = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    return torch.stack(parts).sum(0, dtype=acc).to(bias.dtype)
