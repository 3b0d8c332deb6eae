"""Gradients of low-rank updates on a GPU: grouped products."""

from torch import Tensor

from ._grouped import rows_product, weight_gradient


def low_rank_bwd(
    d_RB: Tensor, rows_RA: Tensor, a_erA: Tensor, b_eBr: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B; see :func:`fairseq_tutel.ops.low_rank_bwd`."""
    d_u = rows_product(d_RB, b_eBr, offsets)
    u = rows_product(rows_RA, a_erA.mT, offsets)
    return weight_gradient(d_u, rows_RA, offsets), weight_gradient(d_RB, u, offsets)
