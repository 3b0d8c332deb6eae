"""Operator of the experts' feed-forward network, alone or with dispatch and combine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import GATES
from ..backends._network import Kept, Pending, Source
from ..backends.torch.activation import acc_dtype
from ._operator import check_indices, check_shape, empty_gradients, operator
from .activation_memory import ActivationMemory, memory_of, restore
from .backend import backend_for, implementation
from .dispatch import check_maps, check_tokens, combine_takes_bias, dispatch_bwd
from .ffn_options import FFNOptions, check_activation, check_ffn, dropout_seed, ffn_flops
from .fp8 import check_fp8

# Largest width of fc1's output for which the products gather the rows from the tokens. Products of
# wide experts take so long that the pass over the rows hardly counts, and torch's own product,
# which cannot gather, is the faster one.
_WIDEST = 2048

_ROUTED = "Tensor x, Tensor? weight, Tensor? dest_row, Tensor? src_pair, Tensor? expert"
_NETWORK = (
    "Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias, Tensor? offsets, "
    "Tensor? seed, str activation, float activation_dropout_p, float dropout_p, bool fp8, "
    "bool late_bias, bool gathers, str keep"
)
_NUM_ROUTED, _NUM_TENSORS = 5, 11  # arguments of both schemas that are tensors


class Saved(NamedTuple):
    """Tensors of a chunk that the backward pass needs beside its rows."""

    hidden: Tensor  # values before the activation, in the format of the memory
    scale: Tensor  # of fp8 values
    active: Tensor  # values after the activation
    seed: Tensor | None  # of the dropout masks


def network_fwd(
    source: Source,
    params: Sequence[Any],
    options: FFNOptions,
    memory: ActivationMemory | None,
    seed: Tensor | None,
) -> tuple[Tensor, Saved]:
    """Compute the outputs of rows, like the rows, and what is kept; ``memory`` None: nothing.

    ``params`` are fc1's weight and bias and fc2's, as of :func:`~fairseq_tutel.ops.expert_ffn`.
    """
    if options.fp8:
        check_fp8(source.values.device)
    hidden, active = (memory.hidden, memory.outputs) if memory else (False, False)
    out, kept = implementation("network_fwd", source.values)(
        source, params, keep_hidden=hidden, keep_active=active, **options.given(seed)
    )
    stored = kept.hidden, out.new_empty(0)
    if memory is not None:
        stored = memory.store(kept.hidden, params[2].shape[2])
    return out, Saved(*stored, kept.active, seed)


def network_bwd(
    d_out: Source,
    source: Source,
    weight_R: Tensor | None,
    saved: Saved,
    params: Sequence[Any],
    options: FFNOptions,
    **needs: bool,
) -> tuple[Tensor, Tensor | None, Any]:
    """Return the gradients of rows and of their weights, and :class:`Pending` or gradients.

    The arguments and results are those of :func:`fairseq_tutel.backends.torch.network_bwd`.
    """
    kept = Kept(restore(saved.hidden, saved.scale, d_out.values), saved.active)
    given = options.given(saved.seed)
    function = implementation("network_bwd", d_out.values)
    return function(d_out, source, weight_R, kept, params, **needs, **given)


def network_bwd_params(
    chunks: Sequence[Pending], params: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of fc1's weight and bias and of fc2's over all chunks."""
    d_w1, d_w2 = implementation("network_bwd_params", chunks[0].d_out)(chunks, params)
    d_b1 = _sum([chunk.d_fc1_bias for chunk in chunks], params[1])
    return d_w1, d_b1, d_w2, _sum([chunk.d_fc2_bias for chunk in chunks], params[3])


def _sum(parts, bias):
    if bias is None:
        return None
    acc = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack(parts).sum(0, dtype=acc).to(bias.dtype)


class _Call:
    """Arguments of the operator, by name."""

    def __init__(self, *arguments: Any):
        self.x, self.weight, self.dest_row, self.src_pair, self.expert = arguments[:_NUM_ROUTED]
        *self.params, self.offsets, self.seed = arguments[_NUM_ROUTED:_NUM_TENSORS]
        activation, p1, p2, fp8, self.late_bias, self.gathers, keep = arguments[_NUM_TENSORS:]
        self.options = FFNOptions(activation, (p1, p2), fp8=fp8)
        self.memory = memory_of(keep)
        rows = self.x.shape[:-1].numel() if self.src_pair is None else self.src_pair.shape[0]
        self.num_rows: int = rows

    @property
    def routed(self) -> bool:
        """Whether ``x`` are tokens, which dispatch and combine move."""
        return self.src_pair is not None

    @property
    def keeps_outputs(self) -> bool:
        return self.memory is not None and self.memory.outputs

    def shaped(self, rows: Tensor) -> Tensor:
        """Return rows (R, M) as the network takes them."""
        if self.offsets is not None:
            return rows
        return rows.view(len(self.params[0]), -1, rows.shape[-1])

    def maps(self) -> dict[str, Tensor | None]:
        return {"dest_row_TK": self.dest_row, "src_pair_R": self.src_pair}

    def split_late_bias(self) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
        """Return the parameters, and the bias that combine adds with the pairs' experts."""
        if not self.late_bias:
            return self.params, None, None
        return [*self.params[:3], None], self.params[3], self.expert


def _fake(*arguments):
    call = _Call(*arguments)
    x, model_dim = call.x, call.x.shape[-1]
    width, hidden_dim = call.params[0].shape[1], call.params[2].shape[2]
    rows = call.num_rows
    every = rows if call.keeps_outputs else 0
    kept = rows if call.memory is not None and call.memory.hidden else 0
    hidden, scale = x.new_empty((kept, width)), x.new_empty(0)
    if call.memory is not None:
        hidden, scale = call.memory.store(hidden, hidden_dim)
    both = every if call.routed else 0
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    dispatched = x.new_empty((0 if call.gathers else both, model_dim))
    active, out = x.new_empty((every, hidden_dim)), x.new_empty((both, model_dim))
    return y, dispatched, hidden, scale, active, out


def _flops(_, *arguments):
    call = _Call(*arguments)
    return ffn_flops(call.num_rows, call.params)


@operator(
    "expert_ffn",
    _fake,
    f"({_ROUTED}, {_NETWORK}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _flops,
)
def _expert_ffn(*arguments):
    """Return the result, and what is kept: rows, hidden values, scales, activations, outputs."""
    call = _Call(*arguments)
    x, (rows, none) = call.x, (call.x.new_empty((0, call.x.shape[-1])) for _ in range(2))
    params, late_bias, late_by = call.split_late_bias()
    source = Source(x, call.offsets)
    if call.routed and call.gathers:
        source = Source(x, call.offsets, **call.maps())
    elif call.routed:
        rows = implementation("dispatch_fwd", x)(x, call.dest_row, call.src_pair)
        source = Source(call.shaped(rows), call.offsets)
    out, saved = network_fwd(source, params, call.options, call.memory, call.seed)
    if not call.routed:
        return out, rows, *saved[:3], none
    out = out.view(-1, x.shape[-1])
    y = implementation("combine_fwd", x)(out, call.dest_row, call.weight, late_bias, late_by)
    if not call.keeps_outputs:
        rows, out = (x.new_empty((0, x.shape[-1])), none)
    return y, rows, *saved[:3], out


def _fake_bwd(dy, rows, hidden, scale, active, out, *arguments):
    *arguments, needs_x, needs_weight, needs_params = arguments
    call = _Call(*arguments)
    routed = [call.x, call.x.new_empty(0) if call.weight is None else call.weight]
    params = [call.x.new_empty(0) if param is None else param for param in call.params]
    return empty_gradients([*routed, *params], [needs_x, needs_weight, *4 * [needs_params]])


def _flops_bwd(_, dy, rows, hidden, scale, active, out, *arguments):
    *arguments, needs_x, _, needs_params = arguments
    call = _Call(*arguments)
    if call.keeps_outputs and not (needs_x or needs_params):
        return 0
    again = hidden.shape[0] < call.num_rows
    return ffn_flops(call.num_rows, call.params, again + needs_x + needs_params, 1 + needs_params)


@operator(
    "expert_ffn_bwd",
    _fake_bwd,
    f"(Tensor dy, Tensor rows, Tensor hidden, Tensor scale, Tensor active, Tensor out, {_ROUTED}, "
    f"{_NETWORK}, bool needs_x, bool needs_weight, bool needs_params) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _flops_bwd,
)
def _expert_ffn_bwd(dy, rows, hidden, scale, active, out, *arguments):
    """Return the gradients of x, weight and the network's parameters.

    After ``dy`` come what :func:`_expert_ffn` kept, its arguments, and which gradients are needed.
    """
    *arguments, needs_x, needs_weight, needs_params = arguments
    call = _Call(*arguments)
    x, d_weight, d_late = call.x, dy.new_empty(0), None
    params, late_bias, late_by = call.split_late_bias()
    d_out, weight_R = Source(dy, call.offsets), None
    source = Source(x, call.offsets)
    if call.routed:
        source = Source(x, call.offsets, **call.maps())
        if call.keeps_outputs and not call.gathers:
            source = Source(call.shaped(rows), call.offsets)
    if call.routed and call.keeps_outputs:
        given = out, call.dest_row, call.src_pair, call.weight, late_bias, late_by
        needs = {"needs_rows": needs_x or needs_params, "needs_weight": needs_weight}
        d_rows, d_weight, d_late = implementation("combine_bwd", dy)(
            dy, *given, **needs, needs_bias=needs_params and call.late_bias
        )
        if not (needs_x or needs_params):
            nothing = [dy.new_empty(0) for _ in range(5)]
            return nothing[0], d_weight, *nothing[1:]
        d_out = Source(call.shaped(d_rows), call.offsets)
    elif call.routed:
        params, d_out = call.params, Source(dy, call.offsets, **call.maps())
        weight_R = row_weights(call.weight, call.src_pair)
    saved = Saved(hidden, scale, active, call.seed)
    needs = {"needs_rows": needs_x, "needs_params": needs_params, "at_once": True}
    d_x, d_weight_R, (d_w1, d_b1, d_w2, d_b2) = network_bwd(
        d_out, source, weight_R, saved, params, call.options, **needs
    )
    if d_weight_R is not None and needs_weight:
        d_weight = pair_values(d_weight_R, call.dest_row).to(call.weight.dtype)
    if call.routed and needs_x:
        d_x = dispatch_bwd(d_x.view(-1, x.shape[-1]), call.dest_row)
    return d_x, d_weight, d_w1, d_b1, d_w2, d_b2 if d_late is None or not call.late_bias else d_late


def _setup(ctx, inputs, output):
    _, *kept = output
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(*kept)
    # or the backward pass would be handed zeros of the size of what was saved
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*kept, *inputs[:_NUM_TENSORS])


def _backward(ctx, dy, *d_kept):
    needs = ctx.needs_input_grad
    if dy is None:
        return (None,) * len(needs)
    needed = needs[0], needs[1], any(needs[_NUM_ROUTED : _NUM_ROUTED + 4])
    d_x, d_weight, *d_params = _expert_ffn_bwd(dy, *ctx.saved_tensors, *ctx.options, *needed)
    grads = d_x, d_weight, None, None, None, *d_params
    grads += (None,) * (len(needs) - len(grads))
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


_expert_ffn.register_autograd(_backward, setup_context=_setup)


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
    fp8: bool = False,
) -> Tensor:
    """Apply ``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert to its own rows.

    The backward pass needs two buffers of R x F numbers, which are kept only if a gradient is
    needed. All tensor arguments but ``offsets`` and ``seed`` are differentiable. Gradients have
    the memory layout of their arguments.

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F); for a gated network (e, 2F, M), (e, 2F), the gate
            first.
        fc2_weight, fc2_bias: (e, M, F), (e, M). Biases may be None.
        activation: swiglu (``silu(gate) * up``) or geglu (``gelu(gate) * up``) for a gated network;
            else gelu (erf), gelu_accurate / gelu_fast (tanh), relu, relu_squared, silu / swish,
            tanh or linear, as in fairseq.
        offsets: (e,) int32 end row of each expert. Rows past the last one are not read; their
            output and gradient are unspecified.
        activation_dropout_p, dropout_p: probabilities after the activation and after fc2
            (default 0).
        seed: seed of the dropout masks, an int or an int64 scalar tensor. None (default) draws one
            from torch's generator of the rows' device: a replayed CUDA graph draws new ones.
        fp8: multiply rows and weights rounded to e4m3, with a scale per row, in the forward pass
            (default False). Gradients are those of the values before rounding.

    Returns:
        Like rows.
    """
    for p in (activation_dropout_p, dropout_p):
        check_activation(activation, p)
    params = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    check_ffn(rows.shape, params, offsets, activation in GATES)
    probabilities = (activation_dropout_p, dropout_p)
    seed = dropout_seed(max(probabilities), seed, rows.device)
    how = activation, *probabilities, fp8, False, False, _keep(ActivationMemory(), rows, *params)
    return _expert_ffn(rows, None, None, None, None, *params, offsets, seed, *how)[0]


def routed_ffn(
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
    """Return ``combine(expert_ffn(dispatch(x)), weight)``, with the results of these operators.

    Tokens, weights and ``params``, fc1's weight and bias and fc2's, are differentiable.

    Args:
        offsets: (e,) int32 end row of each expert; None for equally many rows of each.
        options: activation, dropout, and fp8.
        memory: what is kept for the backward pass.
        late_bias: let combine add fc2's bias if that is faster (default True).
    """
    check_maps(dest_row_TK, src_pair_R)
    check_indices("expert", expert_TK, "tokens", "top_k")
    check_shape("topk_weight", topk_weight_TK, dest_row_TK.shape)
    check_tokens(x_TM.shape, dest_row_TK)
    shape = (len(params[0]), 0) if offsets is None else (0,)
    check_ffn((*shape, x_TM.shape[1]), params, offsets, options.activation in GATES)
    seed = options.draw_seed(x_TM.device)
    biased, drops = params[3] is not None, options.dropout_p[1] > 0
    late = late_bias and biased and not drops and combine_takes_bias(x_TM.device, x_TM.dtype)
    gathers = offsets is not None and not options.fp8 and gathers_tokens(x_TM, params[0])
    if gathers and memory.outputs and not (biased or drops):
        # products gather the tokens' gradients, too, and nothing else needs outputs: fewer bytes
        memory = ActivationMemory("lean")
    keep = _keep(memory, x_TM, topk_weight_TK, *params)
    how = options.activation, *options.dropout_p, options.fp8, late, gathers, keep
    maps = dest_row_TK, src_pair_R, expert_TK
    return _expert_ffn(x_TM, topk_weight_TK, *maps, *params, offsets, seed, *how)[0]


def _keep(memory: ActivationMemory, *tensors: Tensor | None) -> str:
    """Return what is kept, by name, if autograd will ask for a gradient of the tensors."""
    needed = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if not (needed and torch.is_grad_enabled()):
        return ""
    return str(memory)


def gathers_tokens(x_TM: Tensor, fc1_weight: Tensor) -> bool:
    """Return whether products that gather the rows from tokens take less time than dispatch.

    Triton's products gather rows; the torch backend would write them.
    """
    narrow = fc1_weight.shape[1] <= _WIDEST
    return narrow and backend_for(x_TM.device) == "triton" and x_TM.dtype != torch.float64


def row_weights(topk_weight_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Return the weight of the pair in each row, (R,) fp32 (fp64); 0 in unused rows."""
    dtype = acc_dtype(topk_weight_TK.dtype)
    if topk_weight_TK.numel() == 0:
        return topk_weight_TK.new_zeros(len(src_pair_R), dtype=dtype)
    weight_R = topk_weight_TK.reshape(-1).index_select(0, src_pair_R.clamp(min=0).long())
    return weight_R.to(dtype).masked_fill_(src_pair_R < 0, 0)


def pair_values(value_R: Tensor, dest_row_TK: Tensor) -> Tensor:
    """Return the value of the row of each pair, (T, K); 0 of a dropped pair."""
    return torch.cat([value_R, value_R.new_zeros(1)])[dest_row_TK.long()]
