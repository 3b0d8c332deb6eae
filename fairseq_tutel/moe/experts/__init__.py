"""Networks of experts by name: ``--moe-expert-network``, ``MoELayer(expert_network=...)``.

One file each; see base.py.
"""

import contextlib

import torch

from ... import ops
from ...config import EXPERTS, ExpertConfig, Options, option
from ...distributed import ExpertParallelGroups
from .base import ExpertBank, ExpertRows, PreparedExperts
from .ffn import Experts, SharedExpert
from .gated import GeGLUExperts, SwiGLUExperts
from .inference import STORAGES, InferenceExperts, hold_experts
from .lora import LORA_STORAGES, LoRAExperts
from .modules import ExpertList, OwnExperts, is_function, own_experts, with_width
from .network import is_fused
from .plain import ClampedSwiGLUExperts, PlainExperts
from .stacked import Stacked, StackedExperts

register_experts = EXPERTS.register


def make_experts(
    config: ExpertConfig,
    groups: ExpertParallelGroups,
    model_dim: int,
    hidden_dim: int,
    seed: int | None,
) -> ExpertBank:
    """Return the bank of a rank's built-in experts.

    Each storage but "stacked" takes no memory until a state dict is loaded.
    """
    held = config.expert_storage != "stacked"
    with torch.device("meta") if held else contextlib.nullcontext():
        bank = EXPERTS.get(config.expert_network)(
            groups.local_experts,
            model_dim,
            hidden_dim,
            activation=config.activation,
            activation_dropout=config.activation_dropout,
            dropout=config.dropout,
            seed=seed,
            options=config.expert_options,
            # a simulated rank's experts are not compared with any other's
            draw_on_cpu=not groups.simulated,
            hidden_slice=(groups.slice_index, groups.num_slices),
            num_holders=groups.num_replicas,
        )
    if held:
        return hold_experts(bank, config.expert_storage)
    memory = ops.ActivationMemory(config.activation_memory, config.activation_storage)
    bank.set_up(config.expert_compute, memory)
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
