"""The experts' network on tokens whose dispatched rows are never written.

The first product and its weight gradient gather the rows from the tokens.
"""

from torch import Tensor

from ._grouped_tma import Source
from .dispatch import dispatch_bwd
from .expert_ffn import expert_ffn_bwd, expert_ffn_fwd


def token_ffn_fwd(
    x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor, *params: Tensor | None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.token_ffn_fwd` in Triton; fp32, fp16 or bf16."""
    source = Source(src_pair_R, dest_row_TK.shape[1])
    return expert_ffn_fwd(x_TM, *params, source=source, **options)


def token_ffn_bwd(
    d_out: Tensor,
    x_TM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    hidden_RF: Tensor,
    active_RF: Tensor,
    *params: Tensor | None,
    needs_x: bool = True,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.token_ffn_bwd` in Triton."""
    source = Source(src_pair_R, dest_row_TK.shape[1])
    d_rows, *d_params = expert_ffn_bwd(
        d_out, x_TM, hidden_RF, active_RF, *params, needs_rows=needs_x, source=source, **options
    )
    d_x_TM = dispatch_bwd(d_rows, dest_row_TK) if needs_x else d_rows
    return d_x_TM, *d_params
