"""Operators of the MoE layer: ``torch.library`` registration, autograd, choice of backend.

Functions raise ValueError for wrong shapes, dtypes and options. Every function of a layer is also
``torch.ops.fairseq_tutel.<name>``. A file of the same name in
:mod:`fairseq_tutel.backends.torch` computes it on a CPU, and in
:mod:`fairseq_tutel.backends.triton` on a GPU. :mod:`.backend` chooses. The glossary in
``fairseq_tutel/README.md`` explains the letters of shapes.
"""

from ..backends._network import Pending, Source
from ..backends.torch import finite_max, quantize_, source_of_rows
from ._operator import HOW_TO_OFFLOAD
from .activation_memory import ActivationMemory, restore
from .adam import adam16_maxima, adam16_step_, adam16_steps_
from .backend import backend_for, get_backend, set_backend
from .dispatch import combine, combine_bwd, dispatch, dispatch_bwd
from .expert_ffn import (
    Saved,
    expert_ffn,
    network_bwd,
    network_bwd_params,
    network_fwd,
    pair_values,
    routed_ffn,
    row_weights,
)
from .ffn_options import ACTIVATIONS, FFNOptions, activate, check_activation
from .fp8 import FP8_MULTIPLE, check_fp8
from .gate_logits import gate_logits, gate_logits_and_tokens
from .gating import scaled_dot, topk_gating
from .grouped import grouped_linear, rows_product, weight_gradient
from .rows import assign_rows
from .slots import assign_slots
from .wire import decode_rows, encode_rows, wire_bytes

__all__ = [
    "ActivationMemory",
    "FFNOptions",
    "activate",
    "assign_rows",
    "assign_slots",
    "backend_for",
    "combine",
    "decode_rows",
    "dispatch",
    "encode_rows",
    "expert_ffn",
    "gate_logits",
    "get_backend",
    "routed_ffn",
    "scaled_dot",
    "set_backend",
    "topk_gating",
    "wire_bytes",
]
