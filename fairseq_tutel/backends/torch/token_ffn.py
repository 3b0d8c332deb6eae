"""The experts' network on tokens, in plain torch: dispatch, and the network on rows."""

from torch import Tensor

from .dispatch import dispatch_bwd, dispatch_fwd
from .expert_ffn import expert_ffn_bwd, expert_ffn_fwd


def token_ffn_fwd(
    x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor, *params: Tensor | None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`.expert_ffn.expert_ffn_fwd` returns for the dispatched rows."""
    rows_RM = dispatch_fwd(x_TM, dest_row_TK, src_pair_R)
    return expert_ffn_fwd(rows_RM, *params, **options)


def token_ffn_bwd(
    d_out: Tensor,
    x_TM: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    saved: Tensor,
    active_RF: Tensor,
    *params: Tensor | None,
    needs_x: bool = True,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the tokens, of fc1's weight and bias and of fc2's.

    A gradient that is not needed has shape (0,). Rows are dispatched again.
    """
    rows_RM = dispatch_fwd(x_TM, dest_row_TK, src_pair_R)
    d_rows, *d_params = expert_ffn_bwd(
        d_out, rows_RM, saved, active_RF, *params, needs_rows=needs_x, **options
    )
    return dispatch_bwd(d_rows, dest_row_TK) if needs_x else d_rows, *d_params
