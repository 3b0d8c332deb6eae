"""The operators in plain torch, for any device and dtype, and tuned for CPUs.

Names and signatures are those of :mod:`fairseq_tutel.backends.triton`, which lacks what torch's own
products compute on a GPU too. The autograd formulas live in :mod:`fairseq_tutel.ops`; here a
gradient is a plain function (``*_bwd``), as it is there.
"""

from .activation import ACTIVATIONS, bias_act_bwd, bias_act_fwd
from .adam import adam16_maxima, adam16_step_, finite_max, quantize_
from .cumsum import fast_cumsum_sub_one
from .dispatch import combine_bwd, combine_fwd, dispatch_bwd, dispatch_fwd
from .expert_chunks import expert_chunk_bwd, expert_chunks_bwd_params
from .expert_ffn import expert_ffn_bwd, expert_ffn_fwd
from .gate_logits import gate_logits_bwd, gate_logits_fwd
from .gating import topk_gating_bwd, topk_gating_fwd
from .rows import assign_rows_bwd, assign_rows_fwd
from .slots import assign_slots
from .wire import decode_rows, encode_rows

__all__ = [
    "ACTIVATIONS",
    "adam16_maxima",
    "adam16_step_",
    "assign_rows_bwd",
    "assign_rows_fwd",
    "assign_slots",
    "bias_act_bwd",
    "bias_act_fwd",
    "combine_bwd",
    "combine_fwd",
    "decode_rows",
    "dispatch_bwd",
    "dispatch_fwd",
    "encode_rows",
    "expert_chunk_bwd",
    "expert_chunks_bwd_params",
    "expert_ffn_bwd",
    "expert_ffn_fwd",
    "fast_cumsum_sub_one",
    "finite_max",
    "gate_logits_bwd",
    "gate_logits_fwd",
    "quantize_",
    "topk_gating_bwd",
    "topk_gating_fwd",
]
