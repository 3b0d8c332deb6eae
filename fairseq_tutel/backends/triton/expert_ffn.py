"""The experts' feed-forward network on a GPU: products, and a kernel in between.

torch multiplies padded rows; ``_grouped.py`` has the products of ragged rows, which can gather them
from tokens. The functions are those of :mod:`fairseq_tutel.backends.torch`. If the outputs are not
kept, one kernel computes the activation again with its gradient, weighs both, and sums the
gradients of the weights. Products are written so that a gradient has its parameter's layout: a
transposed one would be copied when it is added to the parameter's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._fp8 import restored_rows
from .._network import Gradients, Kept, Pending, Source
from ._autotune import ACT_TILES
from ._grouped import Source as Gathered
from ._grouped import rows_product, weight_gradient
from ._runtime import checked
from ._sizes import cdiv, next_power_of_2
from .activation import bias_act_bwd, bias_act_fwd
from .dispatch import dispatch_fwd
from .wire import quantize_rows


def network_fwd(
    source: Source,
    params: Sequence[Tensor | None],
    *,
    keep_hidden: bool = True,
    keep_active: bool = True,
    fp8: bool = False,
    **options,
) -> tuple[Tensor, Kept]:
    """Compute :func:`fairseq_tutel.backends.torch.network_fwd` in Triton; fp32, fp16 or bf16.

    No kernel spends a pass on the tail of ragged rows.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    middle, last = elementwise(source.offsets, **options)
    rows, gathered = _rows(source, len(fc2_weight), fp8)
    hidden = linear(rows, fc1_weight, source.offsets, gathered, fp8)
    active = bias_act_fwd(hidden, fc1_bias, **middle)
    if not keep_hidden:
        hidden = hidden.new_empty((0, hidden.shape[-1]))
    out = linear(active, fc2_weight, source.offsets, fp8=fp8)
    if fc2_bias is not None or last["dropout_p"] > 0:
        out = bias_act_fwd(out, fc2_bias, **last)
    if not (keep_hidden and keep_active):
        active = active.new_empty((0, active.shape[-1]))
    return out, Kept(hidden.view(-1, hidden.shape[-1]), active.view(-1, active.shape[-1]))


def network_bwd(
    d_out: Source,
    source: Source,
    weight_R: Tensor | None,
    kept: Kept,
    params: Sequence[Tensor | None],
    *,
    needs_rows: bool = True,
    needs_params: bool = True,
    at_once: bool = False,
    fp8: bool = False,
    **options,
) -> tuple[Tensor, Tensor | None, Pending | Gradients]:
    """Compute :func:`fairseq_tutel.backends.torch.network_bwd` in Triton.

    With weights, the gradient of fc2's output in :class:`Pending` is not weighted, and its input
    is.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    middle, last = elementwise(source.offsets, **options)
    offsets = source.offsets
    rows, gathered = _rows(source, len(fc2_weight), fp8)
    d_weight_R, d_b2 = None, d_out.values.new_empty(0)
    drops = last["dropout_p"] > 0  # if not, fc2's output has the gradient dy itself
    # what reads dy beside the products needs its rows
    reads_dy = drops or fc2_bias is not None or not at_once
    dy, from_tokens = _rows(d_out, len(fc2_weight), reads_dy)
    if len(kept.hidden):
        shape = dy.shape[:-1] if offsets is None else (source.num_rows,)
        hidden = kept.hidden.view(*shape, fc1_weight.shape[1])
    else:
        hidden = linear(rows, fc1_weight, offsets, gathered, fp8)
    if drops or (needs_params and fc2_bias is not None and weight_R is None):
        bias = fc2_bias if weight_R is None else None
        d_linear, d_b2 = bias_act_bwd(dy, None, bias, needs_h=drops, **last)
        dy = d_linear if drops else dy
    d_active = rows_product(dy, fc2_weight, offsets, from_tokens)
    if weight_R is None:
        # not in place, which would save R x F numbers: a kernel that is tuned runs several times on
        # what it is given, so that the tuner would have to keep a copy of just that size
        d_hidden, d_b1 = bias_act_bwd(d_active, hidden, fc1_bias, **middle)
        active = kept.active
    else:
        d_hidden, d_b1, active, d_weight_R = weighted_act_bwd(
            d_active, hidden, fc1_bias, weight_R, **middle
        )
        if fc2_bias is not None:
            plain = {**last, "dropout_p": 0.0, "seed": None}
            _, d_b2, _, dot = weighted_act_bwd(dy, None, fc2_bias, weight_R, **plain)
            d_weight_R = d_weight_R + dot
    d_rows = rows_product(d_hidden, fc1_weight, offsets) if needs_rows else dy.new_empty(0)
    active = active.view(-1, active.shape[-1])
    read = source if gathered else Source(rows, offsets)
    pending = Pending(dy, d_hidden, read, active, d_b1, d_b2)
    if not at_once:
        return d_rows, d_weight_R, pending
    if not needs_params:
        none = dy.new_empty(0)
        return d_rows, d_weight_R, (none, none, none, none)
    d_w1, d_w2 = _weight_gradients(pending, from_tokens)
    return d_rows, d_weight_R, (d_w1, d_b1, d_w2, d_b2)


def network_bwd_params(
    chunks: Sequence[Pending], params: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weights.

    The rows of each expert are copied together. The copies cost a few percent of the products, and
    the sum stays in the accumulators of one product.
    """
    if len(chunks) == 1:
        return _weight_gradients(chunks[0])
    d_outs, d_hiddens, sources, actives = zip(*(chunk[:4] for chunk in chunks), strict=True)
    shapes = [d.shape[:-1] for d in d_hiddens]
    actives = [x.view(*s, x.shape[-1]) for x, s in zip(actives, shapes, strict=True)]
    order = ends = None
    if sources[0].offsets is not None:
        ends_De = torch.stack([source.offsets for source in sources])
        count_De = ends_De.diff(dim=1, prepend=torch.zeros_like(ends_De[:, :1]))
        ends = count_De.sum(0).cumsum(0, dtype=torch.int32)
        if ends.numel() > 1:  # else the rows lie together
            expert = torch.arange(ends.numel(), device=ends.device).repeat(len(chunks))
            total = sum(source.num_rows for source in sources)
            order = expert.repeat_interleave(count_De.flatten(), output_size=total)
            order = order.argsort(stable=True)

    def joined(parts):
        whole = torch.cat(parts, 1 if ends is None else 0)
        return whole if order is None else whole.index_select(0, order)

    d_w2 = weight_gradient(joined(d_outs), joined(actives), ends)
    rows = [source.values for source in sources]
    return weight_gradient(joined(d_hiddens), joined(rows), ends), d_w2


def _rows(source: Source, experts: int, written: bool) -> tuple[Tensor, Gathered | None]:
    """Return the rows, or the tokens and how the products of ragged rows gather them.

    Products in fp8 need rows that are ``written``.
    """
    gathered = None if written else _gathered(source)
    return (_dispatched(source, experts) if gathered is None else source.values), gathered


def _gathered(source: Source) -> Gathered | None:
    if source.offsets is None or source.src_pair_R is None or source.dest_row_TK is None:
        return None
    return Gathered(source.src_pair_R, source.dest_row_TK.shape[1])


def _dispatched(source: Source, experts: int) -> Tensor:
    """Return the rows, (R, M) or (e, N, M)."""
    if source.dest_row_TK is None or source.src_pair_R is None:
        return source.values
    rows = dispatch_fwd(source.values, source.dest_row_TK, source.src_pair_R)
    return rows if source.offsets is not None else rows.view(experts, -1, rows.shape[-1])


def _weight_gradients(chunk: Pending, from_tokens: Gathered | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of fc1's and fc2's weights from those of their outputs.

    ``from_tokens`` gathers those of fc2's; products gather their second operand only.
    """
    offsets, gathered = chunk.rows.offsets, _gathered(chunk.rows)
    active = chunk.active.view(*chunk.d_hidden.shape[:-1], chunk.active.shape[-1])
    if from_tokens is None:
        d_w2 = weight_gradient(chunk.d_out, active, offsets)
    else:
        d_w2 = weight_gradient(active, chunk.d_out, offsets, from_tokens, transposed=True)
    return weight_gradient(chunk.d_hidden, chunk.rows.values, offsets, gathered), d_w2


def linear(
    rows: Tensor,
    weight_eBA: Tensor,
    offsets: Tensor | None,
    source: Gathered | None = None,
    fp8: bool = False,
) -> Tensor:
    """Return ``rows @ weight.T`` of each expert; with a ``source`` the rows are tokens."""
    if fp8:
        return _fp8_product(rows, weight_eBA, offsets)
    return rows_product(rows, weight_eBA.transpose(1, 2), offsets, source)


def _fp8_product(rows: Tensor, weight_eBA: Tensor, offsets: Tensor | None) -> Tensor:
    """Return ``rows @ weight.T`` of each expert in e4m3 with a scale per row and output column.

    torch's kernel for groups multiplies on Hopper and Blackwell. In the interpreter, and before
    torch 2.10, the rounded values are multiplied in their own dtype.
    """
    if rows.numel() == 0:
        return rows.new_empty((*rows.shape[:-1], weight_eBA.shape[1]))
    (a, scale_a), (b, scale_b) = quantize_rows(rows), quantize_rows(weight_eBA)
    if not (rows.is_cuda and hasattr(torch.nn.functional, "scaled_grouped_mm")):
        a, b = (restored_rows(*x, rows.dtype) for x in ((a, scale_a), (b, scale_b)))
        return rows_product(a, b.transpose(1, 2), offsets)
    rowwise = torch.nn.functional.ScalingType.RowWise
    out = torch.nn.functional.scaled_grouped_mm(
        a, b.transpose(1, 2), scale_a, rowwise, scale_b, rowwise, offs=offsets
    )
    return out.to(rows.dtype)


def elementwise(
    offsets: Tensor | None,
    *,
    activation: str,
    dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None,
) -> tuple[dict, dict]:
    """Return the options of both elementwise steps: the activation, and what follows fc2.

    Each has its own seed; with one seed both masks would be equal.
    """
    p, last_p = dropout_p
    last_seed = seed + 1 if last_p > 0 else None
    return (
        {"activation": activation, "offsets": offsets, "dropout_p": p, "seed": seed},
        {"activation": "linear", "offsets": offsets, "dropout_p": last_p, "seed": last_seed},
    )


def weighted_act_bwd(
    dy: Tensor, h: Tensor | None, bias: Tensor | None, weight_R: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of ``weight * bias_act_fwd(h)``, and the activation, in one pass.

    They are d_h; d_bias; ``weight * bias_act_fwd(h)``, like dy; ``<dy, bias_act_fwd(h)>``, (R,).
    Without h, of a linear layer, they are those of the bias: no d_h, and no activation.
    ``weight_R`` is fp32; other arguments are those of :func:`.activation.bias_act_bwd`.
    """
    active = None
    if h is not None:
        active = torch.empty_like(dy, memory_format=torch.contiguous_format)
    num_rows, narrowest = weight_R.numel(), min(tile["BLOCK_F"] for tile in ACT_TILES)
    blocks = next_power_of_2(cdiv(dy.shape[-1], narrowest))
    weight_R = checked("weight", weight_R, (num_rows,), (torch.float32,), dy.device)
    dot = dy.new_empty((num_rows, blocks), dtype=torch.float32)
    given = {"needs_h": h is not None, "weighted": (active, dot, weight_R)}
    found = bias_act_bwd(dy, h, bias, **given, **options)
    return *found, active, dot.sum(1)
