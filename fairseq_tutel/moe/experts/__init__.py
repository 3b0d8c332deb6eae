"""Networks of experts by name: ``--moe-expert-network``, ``MoELayer(expert_network=...)``.

One file each; see base.py.
"""

import contextlib
from typing import Any

import torch

from ... import ops
from ...config import EXPERTS, Options, option
from ...distributed import ExpertParallelGroups
from .base import ExpertBank, ExpertRows, PreparedExperts
from .ffn import Experts, SharedExpert
from .gated import GeGLUExperts, SwiGLUExperts
from .inference import STORAGES, InferenceExperts, hold_experts
from .lora import LORA_STORAGES, LoRAExperts
from .modules import ExpertList, own_experts, with_width
from .network import is_fused
from .plain import ClampedSwiGLUExperts, PlainExperts
from .stacked import Stacked, StackedExperts

register_experts = EXPERTS.register


def make_experts(
    network: str,
    groups: ExpertParallelGroups,
    model_dim: int,
    hidden_dim: int,
    storage: str = "stacked",
    options: Any = None,
    compute: str = "same",
    memory: ops.ActivationMemory | None = None,
    **given: Any,
) -> ExpertBank:
    """Return the bank of a rank's experts, whose ``network`` is a name in the registry.

    Every ``storage`` but "stacked" takes no memory until a state dict is loaded. ``given`` are
    other arguments of :class:`StackedExperts`.
    """
    with torch.device("meta") if storage != "stacked" else contextlib.nullcontext():
        bank = EXPERTS.get(network)(
            groups.local_experts,
            model_dim,
            hidden_dim,
            options=EXPERTS.options(network, options),
            # a simulated rank's experts are not compared with any other's
            draw_on_cpu=not groups.simulated,
            hidden_slice=(groups.slice_index, groups.num_slices),
            num_holders=groups.num_replicas,
            **given,
        )
    if storage != "stacked":
        if compute != "same":
            raise ValueError(f"expert_compute={compute!r}: expert_storage={storage!r} has its own")
        return hold_experts(bank, storage)
    bank.set_up(compute, memory or ops.ActivationMemory())
    return bank


__all__ = [
    "ExpertBank",
    "ExpertRows",
    "ClampedSwiGLUExperts",
    "Experts",
    "GeGLUExperts",
    "LoRAExperts",
    "Options",
    "PlainExperts",
    "PreparedExperts",
    "Stacked",
    "StackedExperts",
    "SwiGLUExperts",
    "hold_experts",
    "is_fused",
    "option",
    "register_experts",
]
