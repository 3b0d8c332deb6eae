"""The experts' network in chunks on a GPU, of the parts of ``expert_ffn.py``."""

from torch import Tensor

from .._expert_chain import chain_chunks_bwd_params, chain_rows_bwd
from .expert_ffn import FUNCTIONS


def expert_chunk_bwd(
    d_out: Tensor, hidden_RF: Tensor, *params: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.expert_chunk_bwd` on a GPU."""
    return chain_rows_bwd(FUNCTIONS, d_out, hidden_RF, *params, **options)


def expert_chunks_bwd_params(chunks, offsets, *unused, **options) -> tuple[Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.expert_chunks_bwd_params` on a GPU, which recomputes
    nothing.
    """
    return chain_chunks_bwd_params(FUNCTIONS, chunks, offsets)
