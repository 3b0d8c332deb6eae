"""Types of keyword arguments, for editors and type checkers; nothing reads them at run time.

``tests/moe/test_typed_options.py`` compares them with the configs and MoELayer, which explain them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import nn

    from ..config import ExchangeConfig, ExpertConfig, MoEConfig, Options
    from .experts import OwnExperts


class RoutingOptions(TypedDict, total=False):
    """Fields of :class:`~fairseq_tutel.config.MoEConfig` except ``num_experts``."""

    top_k: int
    capacity_factor: float
    eval_capacity_factor: float
    eval_capacity_token_fraction: float
    second_expert_policy: str
    normalize_before_dropping: bool
    unnormalized_weights: bool
    batch_prioritized: bool
    use_pad_mask: bool
    gating_fp32: bool
    router: str
    gate_noise: float
    input_jitter: float
    input_dropout: float
    z_loss_weight: float
    load_importance_loss: bool
    balance_scope: str
    balance_choices: str
    balance_over: str
    load_bias: str
    load_bias_rate: float
    score_function: str
    num_expert_groups: int
    top_groups: int
    group_score: str
    drop_policy: str
    overflow_rerouting: int
    route_scale: float
    expert_output_masking: float
    final_output_masking: float
    local_drop: float
    null_experts: int
    benchmark: bool
    force_load: str
    router_options: Options | Mapping[str, Any] | None


class ExpertOptions(TypedDict, total=False):
    """Fields of :class:`~fairseq_tutel.config.ExpertConfig`, and ``experts`` as a function."""

    expert_network: str
    activation: str
    dropout: float
    activation_dropout: float
    expert_storage: str
    expert_compute: str
    activation_memory: str
    activation_storage: str
    shared_expert_dim: int
    shared_expert_gate: bool
    expert_options: Options | Mapping[str, Any] | None
    expert_fn: Callable[[], nn.Module] | None


class LayerOptions(RoutingOptions, ExpertOptions, total=False):
    """Single options of :class:`~fairseq_tutel.moe.MoELayer`."""


class BlockOptions(LayerOptions, total=False):
    """Arguments of :class:`~fairseq_tutel.moe.MoELayer` that ``replace_ffn`` passes to it."""

    hidden_dim: int | None
    config: MoEConfig | None
    preset: str | None
    gate: nn.Module | None
    experts: ExpertConfig | OwnExperts | None
    exchange: ExchangeConfig | str
    record_exchange_time: bool
    skip_exchange: bool
    compute_aux: bool
    layer_index: int
