"""The MoE layer as plain PyTorch modules: no fairseq, no Triton, no collectives of its own.

Data flows one way and nothing is parked on a module::

    x_TM -> router -> RoutingPlan -> dispatcher.dispatch -> expert rows -> experts
         -> dispatcher.combine -> y_TM, MoEAux(loss, stats)
"""

from ..config import MoEConfig
from .data_parallel import wrap_data_parallel
from .dispatcher import ExpertRows, dispatch_and_combine
from .experts import Experts
from .layer import MoELayer
from .plan import RoutingPlan
from .router import CosineGate, LinearGate, make_gate, route
from .stats import METRIC_NAMES, MoEAux

__all__ = [
    "METRIC_NAMES",
    "CosineGate",
    "ExpertRows",
    "Experts",
    "LinearGate",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "RoutingPlan",
    "dispatch_and_combine",
    "make_gate",
    "route",
    "wrap_data_parallel",
]
