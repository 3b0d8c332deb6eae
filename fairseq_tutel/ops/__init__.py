"""Operators of the MoE layer: ``torch.library`` registration, autograd, choice of backend.

Every function here is also ``torch.ops.fairseq_tutel.<name>``. What it computes is defined by
:mod:`fairseq_tutel.reference`; on a GPU it runs the Triton kernels of
:mod:`fairseq_tutel.kernels`.
"""

from .activation import bias_act
from .backend import backend_for, get_backend, on_cpu_threads, set_backend
from .dispatch import combine, dispatch
from .expert_ffn import expert_ffn
from .gate import gate_logits
from .grouped import grouped_linear
from .routing import assign_slots, fast_cumsum_sub_one, invert_rows, topk_gating

__all__ = [
    "assign_slots",
    "backend_for",
    "bias_act",
    "combine",
    "dispatch",
    "expert_ffn",
    "fast_cumsum_sub_one",
    "gate_logits",
    "get_backend",
    "grouped_linear",
    "invert_rows",
    "on_cpu_threads",
    "set_backend",
    "topk_gating",
]
