"""The experts' feed-forward network on a GPU: whole products and one kernel between them.

Products of padded rows are torch's, those of ragged rows are in ``_grouped.py``.
"""

from torch import Tensor

from .._expert_chain import Functions, chain_bwd, chain_fwd
from ._grouped import rows_product, weight_gradient
from .activation import bias_act_bwd, bias_act_fwd

FUNCTIONS = Functions(bias_act_fwd, bias_act_bwd, rows_product, weight_gradient)


def expert_ffn_fwd(rows: Tensor, *params: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.expert_ffn_fwd` on a GPU; keeps both hidden values."""
    return chain_fwd(FUNCTIONS, rows, *params, **options)


def expert_ffn_bwd(
    d_out: Tensor, rows: Tensor, hidden_RF: Tensor, active_RF: Tensor, *params: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`fairseq_tutel.backends.torch.expert_ffn_bwd` on a GPU."""
    return chain_bwd(FUNCTIONS, d_out, rows, hidden_RF, active_RF, *params, **options)
