"""The experts' feed-forward network on a GPU, whole or in chunks: products, a kernel in between.

Products of padded rows are torch's, those of ragged rows are in ``_grouped.py``. The functions are
those of :mod:`fairseq_tutel.backends.torch`; the hidden values before and after the activation are
kept for the backward pass, which recomputes nothing.
"""

from .._expert_chain import ExpertChain
from ._grouped import rows_product, weight_gradient
from .activation import bias_act_bwd, bias_act_fwd

_CHAIN = ExpertChain(bias_act_fwd, bias_act_bwd, rows_product, weight_gradient)

expert_ffn_fwd = _CHAIN.forward
expert_ffn_bwd = _CHAIN.backward
expert_chunk_bwd = _CHAIN.rows_backward
expert_chunks_bwd_params = _CHAIN.chunks_backward_params
