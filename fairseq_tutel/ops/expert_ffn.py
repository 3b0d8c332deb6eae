"""Operator of the experts' whole feed-forward network, and the network on rows in chunks.

The functions for chunks are not registered with torch: the overlap of exchange and experts calls
them in its own autograd function. Weight gradients are computed once, over all chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import GATES
from ..backends.torch import ACTIVATIONS
from ._operator import Operator, check_indices, check_shape, empty_gradients, operator
from .backend import implementation
from .fp8 import check_fp8


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

    ``z_NF`` is (N, F), or (N, 2F) of a gated network, the gate's first.
    """
    function, _ = ACTIVATIONS[GATES.get(activation, activation)]
    gate_NF, *up_NF = z_NF.chunk(2 if activation in GATES else 1, 1)
    gate_NF = gate_NF.contiguous()
    active_NF = function(gate_NF, torch.empty_like(gate_NF))
    return active_NF.mul_(up_NF[0]) if up_NF else active_NF


def dropout_seed(
    dropout_p: float, seed: Tensor | int | None, device: torch.device
) -> Tensor | None:
    """Return the seed as an int64 scalar tensor; draw one for None. None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**31, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        # filled by a kernel: a copy from host memory would wait for all work of the GPU
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed


class FFNOptions(NamedTuple):
    """Options of :func:`~fairseq_tutel.ops.expert_ffn`."""

    activation: str
    dropout_p: tuple[float, float]  # after the activation and after fc2
    # index of the slice of hidden units that this rank computes: ranks with equal generators draw
    # different masks for different slices
    part: int = 0
    fp8: bool = False  # the forward pass multiplies in e4m3

    def draw_seed(self, device: torch.device) -> Tensor | None:
        """Draw a seed for the masks of one call; None without dropout."""
        seed = dropout_seed(max(self.dropout_p), None, device)
        # each call uses two seeds, this and the next, for its two masks
        return seed if seed is None or not self.part else seed + 2 * self.part

    def given(self, **more: Tensor | bool | None) -> dict[str, object]:
        """Return the keyword arguments of the backends' functions."""
        return {"activation": self.activation, "dropout_p": self.dropout_p, **more}


# arguments of the network in the schemas of the operators that compute it
NETWORK = (
    "Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias, Tensor? offsets, "
    "Tensor? seed, str activation, float activation_dropout_p, float dropout_p"
)


def split_network(w1, b1, w2, b2, offsets, seed, activation, p1, p2):
    """Return the parameters, and the keyword arguments of the backends' functions."""
    given = FFNOptions(activation, (p1, p2)).given(offsets=offsets, seed=seed)
    return (w1, b1, w2, b2), given


def ffn_flops(rows: int, params: Sequence[Any], firsts: int = 1, seconds: int = 1) -> int:
    """Return the FLOPs of products of rows with fc1's weights, and of those with fc2's.

    All rows of a buffer count, as in torch's own formulas: only the device knows how many are used.
    """
    fc1_weight, _, fc2_weight, *_ = params
    products = firsts * fc1_weight.shape[1:].numel() + seconds * fc2_weight.shape[1:].numel()
    return 2 * rows * products


def ffn_bwd_flops(
    rows: int, params: Sequence[Any], needs_rows: bool, needs_params: bool, again: bool = False
) -> int:
    """Return :func:`ffn_flops` of a backward pass, which may apply fc1 ``again``."""
    return ffn_flops(rows, params, again + needs_rows + needs_params, 1 + needs_params)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd will ask for the gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def fake_params_bwd(params: Sequence[Any], needed: bool) -> tuple[Tensor, ...]:
    """Fake the gradients of the network's parameters; (0,) for a bias that is None."""
    some = [params[0].new_empty(0) if param is None else param for param in params]
    return empty_gradients(some, 4 * [needed])


def _num_rows(rows: Tensor) -> int:
    return rows.shape[:-1].numel()


def network_bwd_operator(name: str, *leading: str) -> Operator:
    """Return the operator of the gradient of :func:`network_operator`'s operator."""
    count = 3 + len(leading)  # with the output's gradient, hidden and active values
    tensors = ", ".join(f"Tensor {each}" for each in ("d_out", *leading, "hidden", "active"))
    needs_first = f"needs_{leading[0]}"

    def fake(*arguments):
        *network, needed, needs_params = arguments[count:]
        d_first = empty_gradients([arguments[1]], [needed])
        return *d_first, *fake_params_bwd(network[:4], needs_params)

    def flops(_, *arguments):
        return ffn_bwd_flops(_num_rows(arguments[0]), arguments[count:], *arguments[-2:])

    @operator(
        name,
        fake,
        f"({tensors}, {NETWORK}, bool {needs_first}, bool needs_params) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        flops,
    )
    def gradients(*arguments):
        *network, needed, needs_params = arguments[count:]
        params, given = split_network(*network)
        given |= {needs_first: needed, "needs_params": needs_params}
        return implementation(name, arguments[1])(*arguments[:count], *params, **given)

    return gradients


def network_operator(name: str, bwd: Operator, fake_out: Callable, *leading: str) -> Operator:
    """Return the operator of the network on the rows that its first tensors give, with gradient.

    A name that ends in ``_fp8`` multiplies in e4m3; its gradient is that of exact products.
    ``leading`` are names of these tensors, of which the first is differentiable; ``fake_out`` makes
    the output without values from them.
    """
    count, function = len(leading), f"{name.removesuffix('_fp8')}_fwd"
    precision = {"fp8": True} if name.endswith("_fp8") else {}

    def fake(*arguments):
        out, w1, w2 = fake_out(*arguments[:count]), arguments[count], arguments[count + 2]
        kept = _num_rows(out) if arguments[-1] else 0
        return out, out.new_empty((kept, w1.shape[1])), out.new_empty((kept, w2.shape[2]))

    def flops(outputs, *arguments):
        return ffn_flops(_num_rows(outputs[0]), arguments[count:])

    tensors = ", ".join(f"Tensor {each}" for each in leading)
    schema = f"({tensors}, {NETWORK}, bool keep_hidden) -> (Tensor, Tensor, Tensor)"

    @operator(name, fake, schema, flops)
    def forward(*arguments):
        if precision:
            check_fp8(arguments[0].device)
        *network, keep_hidden = arguments[count:]
        params, given = split_network(*network)
        given |= {"keep_hidden": keep_hidden, **precision}
        return implementation(function, arguments[0])(*arguments[:count], *params, **given)

    def setup(ctx, inputs, output):
        *tensors, activation, activation_dropout_p, dropout_p, _ = inputs
        _, hidden, active = output
        ctx.options = activation, activation_dropout_p, dropout_p
        ctx.mark_non_differentiable(hidden, active)
        # or the backward pass would be handed zeros of the size of what was saved
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:count], hidden, active, *tensors[count:])

    def backward(ctx, d_out, d_hidden, d_active):
        if d_out is None:
            return (None,) * len(ctx.needs_input_grad)
        needed, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[count : count + 4]
        grads = bwd(d_out, *ctx.saved_tensors, *ctx.options, needed, any(needs))
        d_x, *d_params = (g if n else None for g, n in zip(grads, (needed, *needs), strict=True))
        return d_x, *(None,) * (count - 1), *d_params, *(None,) * 6

    forward.register_autograd(backward, setup_context=setup)
    return forward


def _like(rows: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


_expert_ffn_bwd = network_bwd_operator("expert_ffn_bwd", "rows")
_expert_ffn = network_operator("expert_ffn", _expert_ffn_bwd, _like, "rows")
_expert_ffn_fp8 = network_operator("expert_ffn_fp8", _expert_ffn_bwd, _like, "rows")


def check_ffn(rows: Tensor, params: Sequence[Any], offsets: Tensor | None, gated: bool) -> None:
    """Raise ValueError unless rows, parameters and offsets fit together."""
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    _, model_dim, hidden_dim = fc2_weight.shape
    if rows.dim() != (3 if offsets is None else 2) or rows.shape[-1] != model_dim:
        raise ValueError(
            f"rows must be (experts, rows, {model_dim}), or (rows, {model_dim}) with offsets; got "
            f"{tuple(rows.shape)} with offsets {offsets is not None}"
        )
    experts = rows.shape[0] if offsets is None else offsets.shape[0]
    width = 2 * hidden_dim if gated else hidden_dim
    for name, param, shape in (
        ("fc1_weight", fc1_weight, (experts, width, model_dim)),
        ("fc1_bias", fc1_bias, (experts, width)),
        ("fc2_weight", fc2_weight, (experts, model_dim, hidden_dim)),
        ("fc2_bias", fc2_bias, (experts, model_dim)),
    ):
        check_shape(name, param, shape)
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
    check_ffn(rows, params, offsets, activation in GATES)
    probabilities = (activation_dropout_p, dropout_p)
    seed = dropout_seed(max(probabilities), seed, rows.device)
    function = _expert_ffn_fp8 if fp8 else _expert_ffn
    keep_hidden = needs_gradient(rows, *params)
    return function(rows, *params, offsets, seed, activation, *probabilities, keep_hidden)[0]


class FFNChunk(NamedTuple):
    """Tensors of a chunk that the backward pass needs."""

    rows: Tensor  # (e, N, M), or (R, M) with offsets
    hidden: Tensor  # values before the activation, in a layout of the backend
    active: Tensor  # (R, F), fc2's input
    offsets: Tensor | None  # (e,) int32 end row of each expert, the last of which ends the rows
    seed: Tensor | None  # of the dropout masks


class FFNChunkGradient(NamedTuple):
    """Gradients of a chunk."""

    d_rows: Tensor  # like the rows; (0,) if not needed
    d_out: Tensor  # gradient of fc2's output before dropout
    d_hidden: Tensor  # (R, p F), gradient of the values before the activation
    d_fc1_bias: Tensor
    d_fc2_bias: Tensor


def ffn_chunk(
    rows: Tensor,
    *params: Tensor | None,
    offsets: Tensor | None,
    options: FFNOptions,
    keep_hidden: bool,
) -> tuple[Tensor, FFNChunk]:
    """Compute :func:`~fairseq_tutel.ops.expert_ffn` for a chunk, without autograd.

    ``params`` are fc1's weight and bias and fc2's. Return the output, like rows, and what
    :func:`ffn_chunk_bwd` needs, if ``keep_hidden``.
    """
    seed = options.draw_seed(rows.device)
    given = options.given(offsets=offsets, seed=seed)
    if options.fp8:
        check_fp8(rows.device)
        given["fp8"] = True
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
    """Compute the gradients of a chunk except the weights', so that the rows' can be sent early."""
    given = options.given(offsets=chunk.offsets, seed=chunk.seed)
    backward = implementation("expert_chunk_bwd", d_out)
    return FFNChunkGradient(*backward(d_out, chunk.hidden, *params, needs_rows=needs_rows, **given))


def ffn_chunks_bwd_params(
    chunks: Sequence[FFNChunk], gradients: Sequence[FFNChunkGradient], *params: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of fc1's weight and bias and of fc2's over all chunks."""
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
    acc = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack(parts).sum(0, dtype=acc).to(bias.dtype)
