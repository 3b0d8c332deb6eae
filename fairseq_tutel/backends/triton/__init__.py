"""Triton kernels of the MoE layer; the only room that imports triton.

One source serves NVIDIA and AMD GPUs and, with ``TRITON_INTERPRET=1``, the CPU interpreter.
Each launcher has a twin of the same name and signature in :mod:`fairseq_tutel.backends.torch`;
gradients are plain functions (``*_bwd``). All raise ValueError for a wrong shape, dtype or device.
"""

from ._grouped import rows_product, weight_gradient
from .activation import bias_act_bwd, bias_act_fwd
from .adam import adam16_maxima, adam16_step_, adam16_steps_
from .dispatch import combine_bwd, combine_fwd, dispatch_bwd, dispatch_fwd
from .expert_ffn import network_bwd, network_bwd_params, network_fwd
from .gate_logits import gate_logits_bwd, gate_logits_fwd
from .gating import scaled_dot_fwd, topk_gating_bwd, topk_gating_fwd
from .rows import assign_rows_bwd, assign_rows_fwd, sort_pairs_fwd
from .slots import assign_slots
from .wire import decode_rows, encode_rows, quantize_rows
