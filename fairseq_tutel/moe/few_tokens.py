"""A layer's shortest way: a few tokens on a CPU, where nobody reads gradients or statistics.

A step of generation has one token per sentence and beam. There the usual way spends more time on
tensors of a few indices than on the experts. This one gives the same numbers, bit for bit, wherever
it is taken: by a router that only has logits of its own, without a capacity, with all experts here.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..config import MoEConfig
from .call import LayerCall
from .experts import ExpertBank
from .routers import TopKRouter
from .routing import mask_at_random
from .torch_modes import is_observed, without_autocast


def through_few(
    gate: nn.Module,
    experts: ExpertBank,
    x_TM: torch.Tensor,
    pad_mask_T: torch.Tensor | None,
    call: LayerCall,
) -> torch.Tensor | None:
    """The layer's output [T, M]; None where this way is not for the call."""
    if not (ops.takes_few(x_TM, call.config.top_k) and call.takes_few):
        return None
    if not (_has_only_logits(gate) and experts.computes_used):
        return None
    if not len(x_TM):
        return torch.zeros_like(x_TM)
    with without_autocast(x_TM.device):
        choice_TK, gate_TK = ops.choose_few(gate.logits(x_TM), call.config.top_k)
        few = ops.arrange_few(choice_TK, pad_mask_T)
        if pad_mask_T is not None:
            gate_TK = gate_TK.masked_fill(pad_mask_T[:, None], 0)
        out_RM = experts.used(x_TM.index_select(0, few.token_R), few.spans)
        return few.combine(out_RM, _weights(gate_TK, call.config))


def _has_only_logits(gate):
    only = isinstance(gate, TopKRouter) and type(gate).forward is TopKRouter.forward
    return only and not is_observed(gate)


def _weights(gate_TK: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """As of ``build_routing``, where every pair but those of padding has a row."""
    if gate_TK.shape[1] > 1 and not config.unnormalized_weights:
        epsilon = torch.finfo(gate_TK.dtype).eps
        gate_TK = gate_TK / gate_TK.sum(1, keepdim=True).clamp(min=epsilon)
    if config.route_scale != 1:
        gate_TK = gate_TK * config.route_scale
    return mask_at_random(gate_TK, config.expert_output_masking, training=False)
