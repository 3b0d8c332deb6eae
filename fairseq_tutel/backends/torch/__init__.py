"""The operators in plain torch, for any device and dtype, and tuned for CPUs.

A gradient is a plain function (``*_bwd``); :mod:`fairseq_tutel.ops` registers it with autograd.
"""

import torch

from .._fp8 import quantize_rows
from ._grouped import rows_product, weight_gradient
from .activation import ACTIVATIONS
from .adam import adam16_maxima, adam16_step_, adam16_steps_, finite_max, quantize_
from .dispatch import combine_bwd, combine_fwd, dispatch_bwd, dispatch_fwd
from .expert_ffn import network_bwd, network_bwd_params, network_fwd
from .gate_logits import gate_logits_bwd, gate_logits_fwd
from .gating import scaled_dot_fwd, topk_gating_bwd, topk_gating_fwd
from .rows import assign_rows_bwd, assign_rows_fwd, sort_pairs_fwd, source_of_rows
from .slots import assign_slots
from .wire import decode_rows, encode_rows

# glibc gives each block above a limit back to the system when it is freed, and the next one comes
# page by page, each cleared: a tenth of a small layer's time. The limit follows the largest block
# that was freed, up to 32 MiB; so one is.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8, device="cpu")
