"""The MoE layer as plain PyTorch modules: no fairseq, no Triton, no collectives of its own.

Data flows one way and nothing is parked on a module::

    x_TM -> router -> Routing -> dispatcher.dispatch -> expert rows -> experts
         -> dispatcher.combine -> y_TM, MoEAux(loss, raw counts) -> routing_metrics
"""

import importlib

from ..config import ExchangeConfig, MoEConfig
from .balance import balance_over_ranks
from .chunks import ExpertRows
from .dispatcher import dispatch_and_combine
from .experts import Experts
from .layer import MoELayer
from .metrics import (
    METRIC_NAMES,
    WIRE_ERROR_NAMES,
    WIRE_LAYERS_NAMES,
    MoEAux,
    RouterAux,
    RoutingMetrics,
    routing_metrics,
    wire_errors,
)
from .region_timer import RegionTimer
from .routers import Router, TopKRouter, make_router, register_router, route_logits
from .routing import RouterStep, Routing, build_routing
from .utilisation import (
    UTILISATION_NAMES,
    RoutingCounts,
    Utilisation,
    independent_utilisation,
    routing_counts,
    utilisation,
)

__all__ = [
    "METRIC_NAMES",
    "UTILISATION_NAMES",
    "WIRE_ERROR_NAMES",
    "WIRE_LAYERS_NAMES",
    "ExchangeConfig",
    "ExpertRows",
    "Experts",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "RegionTimer",
    "Router",
    "RouterAux",
    "RouterStep",
    "Routing",
    "RoutingCounts",
    "RoutingMetrics",
    "TopKRouter",
    "Utilisation",
    "balance_over_ranks",
    "build_routing",
    "dispatch_and_combine",
    "independent_utilisation",
    "make_router",
    "register_router",
    "route_logits",
    "routing_counts",
    "routing_metrics",
    "utilisation",
    "wire_errors",
    "wrap_data_parallel",  # noqa: F822 (see __getattr__)
]


def __getattr__(name: str):
    """``wrap_data_parallel`` moved to :mod:`fairseq_tutel.hosts`; its old name goes on to work."""
    if name == "wrap_data_parallel":
        return importlib.import_module("..hosts", __name__).wrap_data_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
