"""Networks of experts by name: ``--moe-expert-network``, ``MoELayer(expert_network=...)``.

One file each; see base.py.
"""

from __future__ import annotations

from ...config import EXPERTS, Options, option
from ...distributed import ExpertParallelGroups
from .base import ExpertBank, ExpertCall
from .ffn import Experts, SharedExpert
from .gated import GeGLUExperts, SwiGLUExperts
from .modules import ExpertList, custom_experts
from .stacked import Stacked, StackedExperts

register_experts = EXPERTS.register


def make_experts(
    network: str, groups: ExpertParallelGroups, model_dim: int, hidden_dim: int, **given
) -> ExpertBank:
    """The bank of a rank's experts; ``given`` are other arguments of :class:`StackedExperts`."""
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
    "GeGLUExperts",
    "Options",
    "SharedExpert",
    "Stacked",
    "StackedExperts",
    "SwiGLUExperts",
    "custom_experts",
    "make_experts",
    "option",
    "register_experts",
]
