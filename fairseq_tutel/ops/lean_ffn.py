"""Operator of dispatch, the experts' network and combine in one, which keeps less.

:func:`expert_ffn` and :func:`combine` keep per row the dispatched row (M numbers), the values
before and after the activation (F each; before the activation 2F of a gated network) and the output
(M). This operator has the same results. It keeps what :class:`ActivationMemory` says, and computes
the rest again in the backward pass. Tokens and routing are kept by their caller anyway.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import GATES, _weights
from ..backends._fp8 import quantize_rows
from ..backends.torch.activation import acc_dtype
from ._operator import check_indices, check_shape, empty_gradients, operator
from .backend import implementation
from .dispatch import check_maps, check_tokens, combine_takes_bias
from .expert_ffn import (
    NETWORK,
    FFNChunk,
    FFNChunkGradient,
    FFNOptions,
    check_ffn,
    fake_params_bwd,
    ffn_bwd_flops,
    ffn_flops,
    needs_gradient,
    split_network,
)
from .fp8 import check_fp8
from .token_ffn import gathers_tokens

MODES = ("fast", "lean", "minimal")
# format of kept values -> their dtype; None: that of the rows
STORED = {"same": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class ActivationMemory:
    """Choice of what experts keep for the backward pass beside tokens and routing.

    ``fast`` keeps rows, values before and after the activation and outputs; ``lean`` only the
    values before the activation; ``minimal`` nothing, so that fc1 is applied again.
    """

    mode: str = "fast"
    storage: str = "same"  # what ``lean`` keeps: as the rows, bf16, or fp8 (with a scale per row)

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"activation_memory={self.mode!r} is none of {', '.join(MODES)}")
        if self.storage not in STORED:
            raise ValueError(f"activation_storage={self.storage!r} is none of {', '.join(STORED)}")
        if self.storage != "same" and self.mode != "lean":
            raise ValueError(
                f"activation_storage={self.storage!r} is for activation_memory='lean', not "
                f"{self.mode!r}"
            )

    @property
    def kept(self) -> str:
        """The storage, or "none" if nothing is kept."""
        return "none" if self.mode == "minimal" else self.storage


def store(hidden: Tensor, hidden_dim: int, storage: str) -> tuple[Tensor, Tensor]:
    """Return the hidden values (R, p F) in a format, and the scale of each F of them in fp8."""
    if storage == "fp8":
        quantized, scale = quantize_rows(hidden.reshape(-1, hidden_dim))
        return quantized.view(hidden.shape), scale
    return hidden.to(STORED.get(storage) or hidden.dtype), hidden.new_empty(0)


def restore(stored: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Return the values of :func:`store` in the dtype of ``like``."""
    if stored.dtype != STORED["fp8"]:
        return stored.to(like.dtype)
    wide = stored.view(len(scale), -1).float().mul_(scale[:, None]) if len(scale) else stored
    return wide.to(like.dtype).view(stored.shape)


def _fake(x, weight, dest_row, src_pair, expert, w1, b1, w2, *arguments):
    storage, rows = arguments[-1], 0 if arguments[-1] == "none" else src_pair.shape[0]
    hidden = x.new_empty((rows, w1.shape[1]), dtype=STORED.get(storage) or x.dtype)
    scales = rows * w1.shape[1] // w2.shape[2] if storage == "fp8" else 0
    y = x.new_empty((dest_row.shape[0], x.shape[1]))
    return y, hidden, x.new_empty(scales, dtype=torch.float32)


def _flops(_, x, weight, dest_row, src_pair, expert, *params):
    return ffn_flops(src_pair.shape[0], params)


_ROUTED = "Tensor x, Tensor topk_weight, Tensor dest_row, Tensor src_pair"


@operator(
    "lean_ffn",
    _fake,
    f"({_ROUTED}, Tensor expert, {NETWORK}, bool fp8, bool late_bias, str storage) "
    "-> (Tensor, Tensor, Tensor)",
    _flops,
)
def _lean_ffn(x, topk_weight, dest_row, src_pair, expert, *arguments):
    *network, fp8, late_bias, storage = arguments
    (w1, b1, w2, b2), given = split_network(*network)
    given["keep_hidden"] = storage != "none"
    late, b2 = (b2, None) if late_bias else (None, b2)
    if fp8:
        check_fp8(x.device)
        given["fp8"] = True
    if given["offsets"] is not None and not fp8 and gathers_tokens(x, w1):
        forward = implementation("token_ffn_fwd", x)
        out, hidden, _ = forward(x, dest_row, src_pair, w1, b1, w2, b2, keep_active=False, **given)
    else:
        rows = implementation("dispatch_fwd", x)(x, dest_row, src_pair)
        if given["offsets"] is None:
            rows = rows.view(len(w1), -1, rows.shape[1])
        forward = implementation("expert_ffn_fwd", x)
        out, hidden, _ = forward(rows, w1, b1, w2, b2, keep_active=False, **given)
        del rows
    late_by = None if late is None else expert
    out = out.view(-1, x.shape[1])
    y = implementation("combine_fwd", x)(out, dest_row, topk_weight, late, late_by)
    return y, *store(hidden, w2.shape[2], storage)


def _fake_bwd(dy, x, weight, dest_row, src_pair, hidden, scale, *arguments):
    *network, _, needs_x, needs_params = arguments
    gradients = empty_gradients([x, weight], [needs_x, True])
    return *gradients, *fake_params_bwd(network[:4], needs_params)


def _flops_bwd(_, dy, x, weight, dest_row, src_pair, hidden, scale, *arguments):
    rows, kept = src_pair.shape[0], hidden.shape[0]
    return ffn_bwd_flops(rows, arguments, *arguments[-2:], again=kept < rows)


@operator(
    "lean_ffn_bwd",
    _fake_bwd,
    f"(Tensor dy, {_ROUTED}, Tensor hidden, Tensor scale, {NETWORK}, bool fp8, bool needs_x, "
    "bool needs_params) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _flops_bwd,
)
def _lean_ffn_bwd(dy, x, topk_weight, dest_row, src_pair, hidden, scale, *arguments):
    *network, fp8, needs_x, needs_params = arguments
    params, given = split_network(*network)
    given |= {"fp8": fp8, "needs_x": needs_x, "needs_params": needs_params}
    maps = topk_weight, dest_row, src_pair, restore(hidden, scale, x)
    return implementation("lean_ffn_bwd", x)(dy, x, *maps, *params, **given)


def _setup(ctx, inputs, output):
    x, topk_weight, dest_row, src_pair, _, *network, activation, p1, p2, fp8, _, _ = inputs
    _, hidden, scale = output
    ctx.options = activation, p1, p2, fp8
    ctx.mark_non_differentiable(hidden, scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, topk_weight, dest_row, src_pair, hidden, scale, *network)


def _backward(ctx, dy, d_hidden, d_scale):
    if dy is None:
        return (None,) * 17
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 5, 6, 7, 8)]
    found = _lean_ffn_bwd(dy, *ctx.saved_tensors, *ctx.options, needs[0], any(needs[2:]))
    d_x, d_weight, *d_params = (g if n else None for g, n in zip(found, needs, strict=True))
    return d_x, d_weight, None, None, None, *d_params, *(None,) * 8


_lean_ffn.register_autograd(_backward, setup_context=_setup)


def lean_ffn(
    x_TM: Tensor,
    topk_weight_TK: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    expert_TK: Tensor,
    *params: Any,
    offsets: Tensor | None,
    options: FFNOptions,
    memory: ActivationMemory,
    late_bias: bool = True,
) -> Tensor:
    """Return ``combine(expert_ffn(dispatch(x)), weight)``, with the bits of these operators.

    Tokens, weights and ``params``, fc1's weight and bias and fc2's, are differentiable.

    Args:
        offsets: (e,) int32 end row of each expert; None for equally many rows of each.
        options: activation, dropout, and fp8.
        memory: what is kept; ``fast`` is not for this operator.
        late_bias: let combine add fc2's bias if that is faster (default True).
    """
    check_maps(dest_row_TK, src_pair_R)
    check_indices("expert", expert_TK, "tokens", "top_k")
    check_shape("topk_weight", topk_weight_TK, dest_row_TK.shape)
    check_tokens(x_TM, dest_row_TK)
    rows = x_TM if offsets is not None else x_TM.new_empty((len(params[0]), 0, x_TM.shape[1]))
    check_ffn(rows, params, offsets, options.activation in GATES)
    seed = options.draw_seed(x_TM.device)
    late = late_bias and combine_takes_bias(x_TM) and options.dropout_p[1] == 0
    kept = memory.kept if needs_gradient(x_TM, topk_weight_TK, *params) else "none"
    how = options.activation, *options.dropout_p, options.fp8, late, kept
    maps = dest_row_TK, src_pair_R, expert_TK
    return _lean_ffn(x_TM, topk_weight_TK, *maps, *params, offsets, seed, *how)[0]


class LeanChunk(NamedTuple):
    """Tensors of a chunk that the backward pass needs."""

    rows: Tensor  # rows that arrived, in the format of the memory; (0,) if they are sent again
    row_scale: Tensor  # of fp8 rows
    hidden: Tensor  # values before the activation, in the format of the memory
    hidden_scale: Tensor
    seed: Tensor | None  # of the dropout masks


def lean_chunk(
    rows: Tensor,
    *params: Any,
    offsets: Tensor | None,
    options: FFNOptions,
    memory: ActivationMemory,
) -> tuple[Tensor, LeanChunk]:
    """Compute :func:`~fairseq_tutel.ops.expert_ffn` for a chunk, without autograd.

    ``params`` are fc1's weight and bias and fc2's. Return the output, like rows, and what
    :func:`lean_chunk_bwd` needs.
    """
    seed = options.draw_seed(rows.device)
    keeps = memory.kept != "none"
    given = options.given(offsets=offsets, seed=seed, keep_hidden=keeps, keep_active=False)
    if options.fp8:
        check_fp8(rows.device)
        given["fp8"] = True
    out, hidden, _ = implementation("expert_ffn_fwd", rows)(rows, *params, **given)
    kept_rows = rows if keeps else rows.new_empty((0, rows.shape[-1]))
    stored_rows = store(kept_rows, rows.shape[-1], memory.kept)
    return out, LeanChunk(*stored_rows, *store(hidden, params[2].shape[2], memory.kept), seed)


def lean_chunk_bwd(
    rows: Tensor | None,
    dy: Tensor,
    weight_R: Tensor,
    chunk: LeanChunk,
    *params: Any,
    offsets: Tensor | None,
    options: FFNOptions,
    needs_rows: bool = True,
) -> tuple[Tensor, Tensor, FFNChunk, FFNChunkGradient]:
    """Compute all gradients of a chunk but those of weights.

    ``rows`` were sent again; None if the chunk keeps them. ``dy`` is the gradient of each row's
    token, not multiplied by the row's weight in ``weight_R``, fp32 (fp64). Return the gradients of
    the rows, (0,) if not needed, and of the weights; and what :func:`ffn_chunks_bwd_params` takes.
    """
    if rows is None:
        rows = restore(chunk.rows, chunk.row_scale, dy).view(dy.shape)
    hidden = restore(chunk.hidden, chunk.hidden_scale, dy)
    given = options.given(offsets=offsets, seed=chunk.seed, fp8=options.fp8)
    backward = implementation("lean_chunk_bwd", dy)
    d_rows, d_weight, d_out, d_hidden, active, *d_biases = backward(
        dy, rows, hidden, weight_R, *params, needs_rows=needs_rows, **given
    )
    gradient = FFNChunkGradient(d_rows, d_out, d_hidden, *d_biases)
    return d_rows, d_weight, FFNChunk(rows, hidden, active, offsets, chunk.seed), gradient


def row_weights(topk_weight_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Return the weight of the pair in each row, (R,) fp32 (fp64); 0 in unused rows."""
    return _weights.row_weights(topk_weight_TK, src_pair_R, acc_dtype(topk_weight_TK.dtype))


def pair_values(value_R: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Return the value of the row of each pair, (T, K); 0 of a dropped pair."""
    return torch.cat([value_R, value_R.new_zeros(1)])[dest_row_TK.long()]


def dispatch_bwd(d_rows_RM: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Return the sum of each token's rows, (T, M), the gradient of dispatch, without autograd."""
    return implementation("dispatch_bwd", d_rows_RM)(d_rows_RM, dest_row_TK)
