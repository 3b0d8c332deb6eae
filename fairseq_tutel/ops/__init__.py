"""Operators of the MoE layer: ``torch.library`` registration, autograd, choice of backend.

Every function of a layer is also ``torch.ops.fairseq_tutel.<name>``. The file of the same name in
:mod:`fairseq_tutel.backends.torch` computes it on a CPU, that in
:mod:`fairseq_tutel.backends.triton` on a GPU; which of the two is decided in :mod:`.backend` alone.
The letters of shapes are those of the glossary in ``fairseq_tutel/README.md``.
"""

from .adam import adam16_maxima, adam16_step_, finite_max, quantize_
from .backend import backend_for, get_backend, set_backend
from .dispatch import combine, dispatch
from .expert_ffn import (
    ACTIVATIONS,
    FFNChunk,
    FFNChunkGradient,
    FFNOptions,
    check_activation,
    expert_ffn,
    ffn_chunk,
    ffn_chunk_bwd,
    ffn_chunks_bwd_params,
)
from .few_tokens import (
    FewRows,
    arrange_few,
    choose_few,
    expert_ffn_few,
    expert_ffn_int8,
    takes_few,
)
from .gate_logits import gate_logits
from .gating import topk_gating
from .rows import assign_rows
from .slots import assign_slots
from .wire import decode_rows, encode_rows, wire_bytes

__all__ = [
    "ACTIVATIONS",
    "FFNChunk",
    "FFNChunkGradient",
    "FFNOptions",
    "FewRows",
    "adam16_maxima",
    "adam16_step_",
    "arrange_few",
    "assign_rows",
    "assign_slots",
    "backend_for",
    "check_activation",
    "choose_few",
    "combine",
    "decode_rows",
    "dispatch",
    "encode_rows",
    "expert_ffn",
    "expert_ffn_few",
    "expert_ffn_int8",
    "ffn_chunk",
    "ffn_chunk_bwd",
    "ffn_chunks_bwd_params",
    "finite_max",
    "gate_logits",
    "get_backend",
    "quantize_",
    "set_backend",
    "takes_few",
    "topk_gating",
    "wire_bytes",
]
