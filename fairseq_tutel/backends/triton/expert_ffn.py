"""The experts' feed-forward network on a GPU, whole or in chunks: products, a kernel in between.

torch multiplies padded rows; ``_grouped.py`` has the products of ragged rows. The functions are
those of :mod:`fairseq_tutel.backends.torch`. The backward pass recomputes nothing: the hidden
values before and after the activation are kept. Products are written so that a gradient has its
parameter's layout: a transposed one would be copied when it is added to the parameter's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._fp8 import quantize_rows, rounded_rows
from ._grouped import Source, rows_product, weight_gradient
from .activation import bias_act_bwd, bias_act_fwd

# the five gradients of a backward pass, in the order of its docstring
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def expert_ffn_fwd(
    rows: Tensor,
    *params: Tensor | None,
    keep_hidden: bool = True,
    keep_active: bool = True,
    source: Source | None = None,
    fp8: bool = False,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the hidden values before and after the activation.

    With a ``source`` the rows are tokens, which the first product gathers. Hidden values are
    (R, F) each, or (0, F) where they are not kept. No kernel spends a pass on the tail of ragged
    rows.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    middle, last = elementwise(**options)
    offsets = middle["offsets"]
    hidden = linear(rows, fc1_weight, offsets, source, fp8)
    active = bias_act_fwd(hidden, fc1_bias, **middle)
    if not keep_hidden:
        hidden = hidden.new_empty((0, hidden.shape[-1]))
    out = linear(active, fc2_weight, offsets, fp8=fp8)
    if fc2_bias is not None or last["dropout_p"] > 0:
        out = bias_act_fwd(out, fc2_bias, **last)
    if not (keep_hidden and keep_active):
        active = active.new_empty((0, active.shape[-1]))
    return out, hidden.view(-1, hidden.shape[-1]), active.view(-1, active.shape[-1])


def expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    hidden_RF: Tensor,
    active_RF: Tensor,
    *params: Tensor | None,
    needs_params: bool = True,
    source: Source | None = None,
    **options,
) -> _Gradients:
    """Return the gradients of the rows, of fc1's weight and bias and of fc2's."""
    d_rows, d_out, d_hidden, d_b1, d_b2 = expert_chunk_bwd(
        d_out, hidden_RF, *params, needs_params=needs_params, **options
    )
    if not needs_params:
        return d_rows, *(rows.new_empty(0) for _ in range(4))
    offsets = options.get("offsets")
    d_w1, d_w2 = weight_gradients(d_out, d_hidden, rows, active_RF, offsets, source)
    return d_rows, d_w1, d_b1, d_w2, d_b2


def weight_gradients(
    d_out: Tensor,
    d_hidden: Tensor,
    rows: Tensor,
    active_RF: Tensor,
    offsets: Tensor | None,
    source: Source | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of fc1's and fc2's weights from those of their outputs."""
    active = active_RF.view(*d_hidden.shape[:-1], active_RF.shape[-1])
    d_w2 = _weight_gradient(d_out, active, offsets)
    return _weight_gradient(d_hidden, rows, offsets, source), d_w2


def expert_chunk_bwd(
    d_out: Tensor,
    hidden_RF: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    needs_params: bool = True,
    **options,
) -> _Gradients:
    """Return all gradients but those of weights.

    They are gradients of the rows, of fc2's output before dropout, of the values before the
    activation, of fc1's bias and of fc2's.
    """
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = params
    middle, last = elementwise(**options)
    offsets = middle["offsets"]
    hidden = hidden_RF.view(*d_out.shape[:-1], fc1_weight.shape[1])
    d_b2 = d_out.new_empty(0)
    drops = last["dropout_p"] > 0  # if not, fc2's output has the gradient d_out itself
    if drops or (needs_params and fc2_bias is not None):
        d_linear, d_b2 = bias_act_bwd(d_out, None, fc2_bias, needs_h=drops, **last)
        d_out = d_linear if drops else d_out
    d_hidden = product(d_out, fc2_weight, offsets)
    # not in place, which would save R x F numbers: a kernel that is tuned runs several times on
    # what it is given, so that the tuner would have to keep a copy of just that size
    d_hidden, d_b1 = bias_act_bwd(d_hidden, hidden, fc1_bias, **middle)
    d_rows = product(d_hidden, fc1_weight, offsets) if needs_rows else d_out.new_empty(0)
    return d_rows, d_out, d_hidden, d_b1, d_b2


def expert_chunks_bwd_params(
    chunks: Sequence[tuple[Tensor, ...]], offsets: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weights.

    The rows of each expert are copied together. The copies cost a few percent of the products, and
    the sum stays in the accumulators of one product.
    """
    d_outs, d_hiddens, rows, actives = zip(*chunks, strict=True)
    shapes = [d.shape[:-1] for d in d_hiddens]
    actives = [x.view(*s, x.shape[-1]) for x, s in zip(actives, shapes, strict=True)]
    order = ends = None
    if offsets[0] is not None:
        ends_De = torch.stack(offsets)
        count_De = ends_De.diff(dim=1, prepend=torch.zeros_like(ends_De[:, :1]))
        ends = count_De.sum(0).cumsum(0, dtype=torch.int32)
        order = _expert_order(count_De, sum(len(x) for x in rows))

    def joined(parts):
        whole = torch.cat(parts, 1 if ends is None else 0)
        return whole if order is None else whole.index_select(0, order)

    d_w2 = _weight_gradient(joined(d_outs), joined(actives), ends)
    d_w1 = _weight_gradient(joined(d_hiddens), joined(rows), ends)
    return d_w1, d_w2


def linear(
    rows: Tensor,
    weight_eBA: Tensor,
    offsets: Tensor | None,
    source: Source | None = None,
    fp8: bool = False,
) -> Tensor:
    """Return ``rows @ weight.T`` of each expert; with a ``source`` the rows are tokens."""
    if fp8:
        if source is not None:  # products in fp8 cannot gather
            rows = rows.index_select(0, source.pair_R.clamp(min=0) // source.top_k)
        return _fp8_product(rows, weight_eBA, offsets)
    return product(rows, weight_eBA.transpose(1, 2), offsets, source)


def product(
    rows: Tensor, weight: Tensor, offsets: Tensor | None, source: Source | None = None
) -> Tensor:
    """Return ``rows @ weight`` of each expert; with a ``source`` the rows are tokens."""
    if offsets is None:
        return torch.bmm(rows, weight)
    return rows_product(rows, weight, offsets, source)


def _fp8_product(rows: Tensor, weight_eBA: Tensor, offsets: Tensor | None) -> Tensor:
    """Return ``rows @ weight.T`` of each expert in e4m3 with a scale per row and output column.

    torch's kernel for groups multiplies on Hopper and Blackwell. In the interpreter, and before
    torch 2.10, the rounded values are multiplied in their own dtype.
    """
    if rows.numel() == 0:
        return rows.new_empty((*rows.shape[:-1], weight_eBA.shape[1]))
    if not (rows.is_cuda and hasattr(torch.nn.functional, "scaled_grouped_mm")):
        return product(rounded_rows(rows), rounded_rows(weight_eBA).transpose(1, 2), offsets)
    (a, scale_a), (b, scale_b) = quantize_rows(rows), quantize_rows(weight_eBA)
    rowwise = torch.nn.functional.ScalingType.RowWise
    out = torch.nn.functional.scaled_grouped_mm(
        a, b.transpose(1, 2), scale_a, rowwise, scale_b, rowwise, offs=offsets
    )
    return out.to(rows.dtype)


def _weight_gradient(
    d: Tensor, rows: Tensor, offsets: Tensor | None, source: Source | None = None
) -> Tensor:
    if offsets is None:
        return torch.bmm(d.transpose(1, 2), rows)
    return weight_gradient(d, rows, offsets, source)


def elementwise(
    *,
    activation: str,
    offsets: Tensor | None = None,
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


def _expert_order(count_De: Tensor, num_rows: int) -> Tensor | None:
    """Return the order of the chunks' rows by expert; None for one expert."""
    chunks, experts = count_De.shape
    if experts == 1:
        return None
    expert = torch.arange(experts, device=count_De.device).repeat(chunks)
    return expert.repeat_interleave(count_De.flatten(), output_size=num_rows).argsort(stable=True)
