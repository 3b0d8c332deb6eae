"""Networks of experts by name: ``--moe-expert-network``, ``MoELayer(expert_network=...)``.

One file each; see base.py.
"""

from __future__ import annotations

import torch

from ...config import EXPERTS, Options, option
from ...distributed import ExpertParallelGroups
from .base import ExpertBank, ExpertCall
from .ffn import Experts, SharedExpert
from .gated import GeGLUExperts, SwiGLUExperts
from .inference import STORAGES, InferenceExperts, hold_experts
from .modules import ExpertList, custom_experts
from .stacked import Stacked, StackedExperts

register_experts = EXPERTS.register


def make_experts(
    network: str,
    groups: ExpertParallelGroups,
    model_dim: int,
    hidden_dim: int,
    storage: str = "stacked",
    **given,
) -> ExpertBank:
    """The bank of a rank's experts; ``given`` are other arguments of :class:`StackedExperts`. For
    another ``storage`` no memory is taken until a state dict is loaded.
    """
    if storage != "stacked":
        with torch.device("meta"):
            return hold_experts(
                make_experts(network, groups, model_dim, hidden_dim, **given), storage
            )
    return EXPERTS.get(network)(
        groups.local_experts,
        model_dim,
        hidden_dim,
        # the experts of a simulated rank are compared with no other's
        draw_on_cpu=not groups.simulated,
        hidden_slice=(groups.slice_index, groups.num_slices),
        num_holders=groups.num_replicas,
        **given,
    )


__all__ = [
    "ExpertBank",
    "ExpertCall",
    "ExpertList",
    "Experts",
    "InferenceExperts",
    "STORAGES",
    "GeGLUExperts",
    "Options",
    "SharedExpert",
    "Stacked",
    "StackedExperts",
    "SwiGLUExperts",
    "custom_experts",
    "hold_experts",
    "make_experts",
    "option",
    "register_experts",
]
