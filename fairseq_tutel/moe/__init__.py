"""The MoE layer as plain PyTorch modules, without fairseq and Triton."""

from ..config import ExchangeConfig, MoEConfig
from ..ops import ActivationMemory
from .balance import balance_over_ranks
from .experts import ExpertBank, ExpertRows, Experts, hold_experts, register_experts
from .layer import MoELayer
from .metrics import (
    HELP_LAYERS_NAME,
    HELP_NAMES,
    UTILISATION_NAMES,
    WIRE_ERROR_NAMES,
    WIRE_LAYERS_NAMES,
    RoutingCounts,
    Utilisation,
    help_counts,
    routing_counts,
    utilisation,
    wire_errors,
)
from .replace import every_other, layers_with_ffn, parts_of_ffn, replace_ffn
from .reports import METRIC_NAMES, MoEAux, RouterAux, metrics_of, routing_metrics
from .routers import Router, TopKRouter, make_router, register_router, route_logits
from .routing import RouterCall, Routing, build_routing

__all__ = [
    "HELP_LAYERS_NAME",
    "HELP_NAMES",
    "METRIC_NAMES",
    "UTILISATION_NAMES",
    "WIRE_ERROR_NAMES",
    "WIRE_LAYERS_NAMES",
    "ActivationMemory",
    "ExchangeConfig",
    "ExpertBank",
    "ExpertRows",
    "Experts",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "Router",
    "RouterAux",
    "RouterCall",
    "Routing",
    "RoutingCounts",
    "TopKRouter",
    "Utilisation",
    "balance_over_ranks",
    "build_routing",
    "every_other",
    "help_counts",
    "hold_experts",
    "layers_with_ffn",
    "make_router",
    "parts_of_ffn",
    "register_experts",
    "register_router",
    "replace_ffn",
    "route_logits",
    "routing_counts",
    "routing_metrics",
    "utilisation",
    "wire_errors",
]
