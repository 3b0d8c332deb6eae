"""Operators of the MoE layer: ``torch.library`` registration, autograd, choice of backend.

Functions raise ValueError for wrong shapes, dtypes and options. Every function of a layer is also
``torch.ops.fairseq_tutel.<name>``. A file of the same name in
:mod:`fairseq_tutel.backends.torch` computes it on a CPU, and in
:mod:`fairseq_tutel.backends.triton` on a GPU. :mod:`.backend` chooses. The glossary in
``fairseq_tutel/README.md`` explains the letters of shapes.
"""

from ..backends.torch import finite_max, quantize_, source_of_rows
from ._operator import HOW_TO_OFFLOAD
from .adam import adam16_maxima, adam16_step_, adam16_steps_
from .backend import backend_for, get_backend, set_backend
from .dispatch import combine, combine_takes_bias, dispatch
from .expert_ffn import (
    ACTIVATIONS,
    FFNChunk,
    FFNChunkGradient,
    FFNOptions,
    activate,
    check_activation,
    expert_ffn,
    ffn_chunk,
    ffn_chunk_bwd,
    ffn_chunks_bwd_params,
)
from .fp8 import FP8_MULTIPLE, check_fp8
from .gate_logits import gate_logits, gate_logits_and_tokens
from .gating import scaled_dot, topk_gating
from .lean_ffn import (
    ActivationMemory,
    LeanChunk,
    dispatch_bwd,
    lean_chunk,
    lean_chunk_bwd,
    lean_ffn,
    pair_values,
    row_weights,
)
from .low_rank import low_rank_bwd
from .rows import assign_rows
from .slots import assign_slots
from .token_ffn import gathers_tokens, token_ffn
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
    "lean_ffn",
    "scaled_dot",
    "set_backend",
    "token_ffn",
    "topk_gating",
    "wire_bytes",
]
