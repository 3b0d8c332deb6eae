"""The experts' whole feed-forward network in plain torch: one expert after the other.

What the backward pass needs is kept, or computed again one expert after the other, so that it is no
larger than the rows of one expert. An output before combining is ``out = fc2(a)``. The gradient of
its weight is ``<dy, out>``, or ``<dy fc2, a> + <dy, bias>``. The gradient of ``a`` needs the
product ``dy fc2`` anyway, so that the second product of the forward pass is never repeated.

The same rows give the same bits on the same number of threads. Evaluation and training give the
same bits if a row of hidden values is a multiple of 64 bytes: torch's products of few numbers
depend on where a buffer begins.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._network import Gradients, Kept, Pending, Source
from ._expert_rows import Network, groups_of, sum_rows, sum_weights
from ._memory import empty
from .dispatch import dispatch_fwd, zero_unused


def network_fwd(
    source: Source,
    params: Sequence[Tensor | None],
    *,
    keep_hidden: bool = True,
    keep_active: bool = True,
    **options,
) -> tuple[Tensor, Kept]:
    """Return ``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows; everything else is computed in fp32 (fp64).
    NOTE: on a GPU the host waits for offsets and seed.

    ``params`` and offsets are those of :func:`fairseq_tutel.ops.expert_ffn`; ``options`` those of
    :class:`._expert_rows.Network`. Return the outputs like the rows, unspecified past the last
    expert's; and what is kept, as asked.
    """
    fc1_weight, _, fc2_weight, _ = params
    experts, model_dim, hidden_dim = fc2_weight.shape
    rows = source.values
    if source.src_pair_R is not None:
        rows = dispatch_fwd(rows, source.dest_row_TK, source.src_pair_R)
        rows = rows if source.offsets is not None else rows.view(experts, -1, model_dim)
    network = Network(rows, hidden_dim, **options)
    rows_RM = rows.reshape(-1, model_dim)
    # contiguous, as the operator promises, and no view: callers may change it in place
    out = empty(fc2_weight, rows.shape)
    out_RM = out.view(-1, model_dim)
    kept = len(rows_RM) if keep_hidden else 0
    saved = empty(fc1_weight, (kept, fc1_weight.shape[1]))
    active = empty(fc1_weight, (kept if keep_active else 0, hidden_dim))
    buffers = (
        network.planes(saved) if keep_hidden else None,
        active if keep_hidden and keep_active else None,
    )
    for group in groups_of(rows, hidden_dim, source.offsets):
        network.forward(group, params, rows_RM, out_RM, *buffers)
    return out, Kept(saved, active)


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
    **options,
) -> tuple[Tensor, Tensor | None, Pending | Gradients]:
    """Return the gradients of the rows and of their weights, and what those of parameters need.

    Args:
        d_out: gradients of the outputs if ``weight_R`` is None. Otherwise gradients of the weighted
            outputs' sums, which have not been multiplied by the weights.
        source: the rows.
        weight_R: weights of the rows, fp32 (fp64), if the outputs were not kept.
        kept: second value of :func:`network_fwd`; the activation is kept if ``weight_R`` is None.
        at_once: return the gradients of the parameters.

    Returns:
        d_rows (R, M) or like the rows, (0,) unless needed; d_weight (R,) or None; and
        :class:`Pending`, or with ``at_once`` the parameters' gradients in the dtype of the rows.
    """
    _, model_dim, hidden_dim = params[2].shape
    network = Network(d_out.values, hidden_dim, **options)
    rows = _blank(source, len(params[2]))
    d_rows = empty(rows, rows.shape if needs_rows else (0,))
    saved_pRF = network.planes(kept.hidden) if len(kept.hidden) else None
    d_weight_R = None if weight_R is None else torch.zeros_like(weight_R)
    active_RF = kept.active
    if weight_R is not None and not at_once:
        active_RF = empty(rows, (source.num_rows, hidden_dim))
    kept_rows = source.num_rows if needs_params and not at_once else 0
    d_fc2_RM, d_fc1_RF = (
        empty(rows, (kept_rows, width)) for width in (model_dim, params[0].shape[1])
    )
    d_weights = [empty(w, w.shape if needs_params and at_once else (0,)) for w in params[::2]]
    d_biases = network.bias_gradients(params, needs_params)
    read_x, read_dy = _reader(source, model_dim), _reader(d_out, model_dim)
    for group in groups_of(rows, hidden_dim, source.offsets):
        reads = saved_pRF is None or (needs_params and at_once)
        x, dy = group.shape(read_x(group.rows)) if reads else None, group.shape(read_dy(group.rows))
        is_kept = len(active_RF) == source.num_rows
        active = group.split(active_RF) if is_kept else dy.new_empty((*dy.shape[:2], hidden_dim))
        weighted = None
        if weight_R is not None and d_weight_R is not None:
            weighted = group.split(weight_R), group.split(d_weight_R)
        d_group = group.split(d_rows.view(-1, model_dim)) if needs_rows else None
        d_fc2, d_fc1 = network.backward(group, params, x, dy, weighted, saved_pRF, active, d_group)
        if kept_rows:
            group.split(d_fc2_RM).copy_(d_fc2)
            group.split(d_fc1_RF).copy_(d_fc1)
        elif needs_params:
            sum_weights(group, (d_fc2, d_fc1, x, active), d_weights)
        for d, d_bias in zip((d_fc1, d_fc2), d_biases, strict=True):
            sum_rows(d, d_bias[group.experts])
    if not at_once:
        return d_rows, d_weight_R, Pending(d_fc2_RM, d_fc1_RF, source, active_RF, *d_biases)
    d_b1, d_b2 = (d.to(rows.dtype) for d in d_biases)
    return d_rows, d_weight_R, (d_weights[0], d_b1, d_weights[1], d_b2)


def network_bwd_params(
    chunks: Sequence[Pending], params: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of fc1's and fc2's weights, (e, p F, M) and (e, M, F), over all chunks.

    The rows of an expert are copied together for one product: torch has no product of halves that
    keeps its fp32 sums, and a sum of rounded products would be rounded once per chunk.
    """
    d_w1, d_w2 = empty(params[0], params[0].shape), empty(params[2], params[2].shape)
    ends = [_ends(chunk.rows) for chunk in chunks]
    flat = [
        [x.reshape(-1, x.shape[-1]) for x in (c.d_out, c.d_hidden, c.rows.values, c.active)]
        for c in chunks
    ]
    for expert in range(len(d_w1)):
        own = [slice(each[expert], each[expert + 1]) for each in ends]
        parts = (
            [x[of_chunk] for x, of_chunk in zip(of_chunks, own, strict=True)]
            for of_chunks in zip(*flat, strict=True)
        )
        d_fc2, d_fc1, rows, active = (x[0] if len(x) == 1 else torch.cat(x) for x in parts)
        torch.mm(d_fc2.t(), active, out=d_w2[expert])
        torch.mm(d_fc1.t(), rows, out=d_w1[expert])
    return d_w1, d_w2


def _ends(rows: Source) -> list[int]:
    """Return 0 and the end row of each expert."""
    if rows.offsets is not None:
        return [0, *rows.offsets.tolist()]
    experts, capacity, _ = rows.values.shape
    return [capacity * expert for expert in range(experts + 1)]


def _blank(source: Source, experts: int) -> Tensor:
    """Return a tensor of the rows' shape without their values."""
    if source.src_pair_R is None:
        return source.values
    model_dim = source.values.shape[-1]
    if source.offsets is None:
        shape = experts, source.num_rows // experts, model_dim
    else:
        shape = source.num_rows, model_dim
    return source.values.new_empty(1).expand(shape)


def _reader(source: Source, model_dim: int) -> Callable[[slice], Tensor]:
    """Return a function that reads a slice of the rows, (n, M), zero if unused."""
    dest_row_TK, src_pair_R = source.dest_row_TK, source.src_pair_R
    if dest_row_TK is None or src_pair_R is None:
        rows_RM = source.values.reshape(-1, model_dim)
        return lambda rows: rows_RM[rows]
    x_TM = source.values
    if dest_row_TK.numel() == 0:
        return lambda rows: dispatch_fwd(x_TM, dest_row_TK, src_pair_R[rows])
    token_R = src_pair_R.clamp(min=0).long() // dest_row_TK.shape[1]
    return lambda rows: zero_unused(x_TM.index_select(0, token_R[rows]), src_pair_R[rows])
