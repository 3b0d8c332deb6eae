"""Pure-torch twins of every kernel: same names, same signatures, any device and dtype.

``expert_ffn`` and ``gate_logits`` have no kernels: they are how a CPU computes what products and
kernels do on a GPU.

They are the CPU backend, the yardstick of the kernel tests and the readable definition of each
operator. The autograd formulas live in :mod:`fairseq_tutel.ops`; here a gradient is a plain
function (``*_bwd``), as it is in :mod:`fairseq_tutel.kernels`.
"""

from .activation import ACTIVATIONS, bias_act_bwd, bias_act_fwd
from .dispatch import combine_bwd, combine_fwd, dispatch_bwd, dispatch_fwd
from .expert_ffn import expert_ffn_bwd, expert_ffn_fwd
from .gate import gate_logits_bwd, gate_logits_fwd
from .routing import (
    assign_slots,
    fast_cumsum_sub_one,
    invert_rows,
    topk_gating_bwd,
    topk_gating_fwd,
)

__all__ = [
    "ACTIVATIONS",
    "assign_slots",
    "bias_act_bwd",
    "bias_act_fwd",
    "combine_bwd",
    "combine_fwd",
    "dispatch_bwd",
    "dispatch_fwd",
    "expert_ffn_bwd",
    "expert_ffn_fwd",
    "fast_cumsum_sub_one",
    "gate_logits_bwd",
    "gate_logits_fwd",
    "invert_rows",
    "topk_gating_bwd",
    "topk_gating_fwd",
]
