"""The experts' whole feed-forward network in plain torch: one expert after the other.

The values before and after the activation are kept for the backward pass, as by the kernels.
Everything else is as large as the rows of one expert, or as a part of them.

The same rows give the same bits on the same number of threads. Evaluation and training give the
same bits if a row of hidden values is a multiple of 64 bytes: torch's products of few numbers
depend on where a buffer begins.
"""

from torch import Tensor

from ._expert_rows import Network, groups_of, sum_params
from ._memory import empty


def expert_ffn_fwd(
    rows: Tensor,
    *params: Tensor | None,
    keep_hidden: bool = True,
    keep_active: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows; everything else is computed in fp32 (fp64).
    NOTE: on a GPU the host waits for offsets and seed.

    Rows, parameters and offsets are those of :func:`fairseq_tutel.ops.expert_ffn`; the other
    options are those of :class:`._expert_rows.Network`.

    Returns:
        out: like rows; rows past the last expert's are unspecified.
        saved: fc1's products in an order of this file's own, (R, p F), p = 2 for a gated network;
            (0, p F) without ``keep_hidden``.
        active: (R, F), or (0, F) unless both are kept, what fc2 is given.
    """
    fc1_weight, _, fc2_weight, _ = params
    _, model_dim, hidden_dim = fc2_weight.shape
    network = Network(rows, hidden_dim, **options)
    rows_RM = rows.reshape(-1, model_dim)
    # contiguous, as the operator promises, and no view: callers may change it in place
    out = empty(rows, rows.shape)
    out_RM = out.view(-1, model_dim)
    kept = len(rows_RM) if keep_hidden else 0
    saved = empty(rows, (kept, fc1_weight.shape[1]))
    active = empty(rows, (kept if keep_active else 0, hidden_dim))
    buffers = (
        network.planes(saved) if keep_hidden else None,
        active if keep_hidden and keep_active else None,
    )
    for group in groups_of(rows, hidden_dim, offsets):
        network.forward(group, params, rows_RM, out_RM, *buffers)
    return out, saved, active


def expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    saved: Tensor,
    active_RF: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    needs_params: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`expert_ffn_fwd`: of the rows, fc1's weight and bias, fc2's.

    A gradient that is not needed has shape (0,), as has that of a bias that is not there. ``saved``
    and ``active_RF`` are the second and third value of the forward pass.
    """
    _, model_dim, hidden_dim = params[2].shape
    network = Network(rows, hidden_dim, **options)
    rows_RM, d_out_RM = rows.reshape(-1, model_dim), d_out.reshape(-1, model_dim)
    saved_pRF = network.planes(saved)
    d_rows = empty(rows, rows.shape if needs_rows else (0,))
    d_rows_RM = d_rows.view(rows_RM.shape) if needs_rows else None
    d_w1, d_w2 = (empty(w, w.shape if needs_params else (0,)) for w in params[::2])
    d_b1, d_b2 = network.bias_gradients(params, needs_params)
    for group in groups_of(rows, hidden_dim, offsets):
        d_fc2, d_fc1 = network.backward(group, params, d_out_RM, saved_pRF, d_rows_RM)
        if needs_params:
            values = d_fc2, d_fc1, group.split(rows_RM), group.split(active_RF)
            sum_params(group, values, (d_w1, d_b1, d_w2, d_b2))
    return d_rows, d_w1, d_b1.to(rows.dtype), d_w2, d_b2.to(rows.dtype)
