"""The experts' whole feed-forward network in plain torch: a block of rows at a time.

Of the four buffers of R x F numbers of the step by step computation the values before and after the
activation remain, as with the kernels; all else is as large as a block. Blocks run one after the
other on torch's own threads, so the same rows give the same bits on the same number of threads; so
do evaluation and training where a row of hidden values is a multiple of 64 bytes (or there is one
block): torch's products of few numbers depend on where a buffer begins.
Where an expert has few rows a block is all rows of several experts: one batched product is 5 %
faster than theirs one by one (256 rows, 256/1024, 1 thread).
"""

from collections.abc import Sequence

from torch import Tensor

from ._expert_blocks import Blocks
from ._memory import empty
from .expert_chunks import expert_chunk_bwd, expert_chunks_bwd_params


def expert_ffn_fwd(
    rows: Tensor, *params: Tensor | None, keep_hidden: bool = True, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows, everything else is computed in fp32 (fp64).
    Shapes are those of :func:`fairseq_tutel.ops.expert_ffn`. ``params``: fc1's weight and bias,
    fc2's; ``options``: ``activation``, ``offsets``, ``dropout_p`` after the activation and after
    fc2, and ``seed``, an int64 scalar tensor, needed with dropout. NOTE: on a GPU the host waits
    for offsets and seed.

    Returns the output; what the backward pass needs of the values before the activation, (R, F), or
    (0, F) without ``keep_hidden`` (of a gated network (R, 2 F), in an order of this file's own);
    the values after activation and dropout, which fc2 is given, in the shape (R, F) or (0, F).
    """
    fc1_weight, _, fc2_weight, _ = params
    _, model_dim, hidden_dim = fc2_weight.shape
    to = Blocks.of(rows, hidden_dim, **options)
    rows_RM = rows.reshape(-1, model_dim)
    # contiguous, as the operator promises, and no view: callers may change it in place
    out = empty(rows, rows.shape)
    out_RM = out.view(-1, model_dim)
    kept = rows_RM.shape[0] if keep_hidden else 0
    saved_RF, active_RF = (empty(rows, (kept, n)) for n in (fc1_weight.shape[1], hidden_dim))
    run_blocks(to, rows_RM, params, out_RM, (saved_RF, active_RF) if keep_hidden else None)
    to.without_unused(out_RM)
    return out, saved_RF, active_RF


def run_blocks(
    to: Blocks,
    rows_RM: Tensor,
    params: Sequence[Tensor | None],
    out_RM: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill the blocks' rows of the output, and what is kept for the backward pass if wanted."""
    w1, b1, w2, b2 = params
    for block in to.blocks:
        x, y = rows_RM[block.rows], out_RM[block.rows]
        saved, active = (None, None) if kept is None else (each[block.rows] for each in kept)
        z = to.fc1(block, x, w1, b1, x.new_empty(len(x), w1.shape[1]) if saved is None else saved)
        keep_a, keep_y = to.masks(block, y)
        biased = to.linear(block, to.activate(z, keep_a, out=active), w2, b2, y)
        if keep_y is not None:
            biased.mul_(keep_y)
        if biased is not y:
            y.copy_(biased)


def expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    saved: Tensor,
    active: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    needs_params: bool = True,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`expert_ffn_fwd`: of the rows, fc1's weight and bias, fc2's.

    ``saved``, ``active``: second and third value of the forward pass. A gradient that is not needed
    comes back with shape (0,), as does that of a bias that is not there.
    """
    _, model_dim, hidden_dim = params[2].shape
    to = Blocks.of(rows, hidden_dim, **options)
    if needs_params and to.dtype != to.acc:
        # one product per expert: a sum over blocks in half precision is rounded once per block
        d_rows, d_out, d_hidden_RF, d_b1, d_b2 = expert_chunk_bwd(
            d_out, saved, *params, needs_rows=needs_rows, **options
        )
        chunk = (d_out, d_hidden_RF, rows, active)
        d_w1, d_w2 = expert_chunks_bwd_params([chunk], [options.get("offsets")])
        to.without_unused(d_rows.view(-1, model_dim))
        return d_rows, d_w1, d_b1.to(rows.dtype), d_w2, d_b2.to(rows.dtype)
    rows_RM, d_out_RM = rows.reshape(-1, model_dim), d_out.reshape(-1, model_dim)
    d_rows_RM = empty(rows, rows_RM.shape if needs_rows else (0,))
    d_b1, d_b2 = to.bias_sums(params, needs_params)
    d_w1, d_w2 = (empty(w, w.shape if needs_params else (0,)) for w in params[::2])
    for block, dy, d_h in to.backward(d_out_RM, saved, params, d_rows_RM, d_b1, d_b2):
        if needs_params:
            block.add_products(d_w2, dy, active[block.rows])
            block.add_products(d_w1, d_h, rows_RM[block.rows])
    d_rows = to.without_unused(d_rows_RM).view(rows.shape if needs_rows else 0)
    return d_rows, d_w1, d_b1.to(rows.dtype), d_w2, d_b2.to(rows.dtype)
