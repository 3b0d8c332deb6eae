"""Gradients of low-rank updates in plain torch."""

import torch
from torch import Tensor


def low_rank_bwd(
    d_RB: Tensor, rows_RA: Tensor, a_erA: Tensor, b_eBr: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B; see :func:`fairseq_tutel.ops.low_rank_bwd`.

    NOTE: on a GPU the host waits for offsets.
    """
    d_a, d_b = torch.empty_like(a_erA), torch.empty_like(b_eBr)
    ends = offsets.tolist()
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        d, rows = d_RB[begin:end], rows_RA[begin:end]
        torch.mm((d @ b_eBr[expert]).t(), rows, out=d_a[expert])
        torch.mm(d.t(), rows @ a_erA[expert].t(), out=d_b[expert])
    return d_a, d_b
