"""The MoE layer as plain PyTorch modules: no fairseq, no Triton, no collectives of its own.

Data flows one way and nothing is parked on a module::

    x_TM -> router -> Routing -> dispatcher.dispatch -> expert rows -> experts
         -> dispatcher.combine -> y_TM, MoEAux(loss, stats)
"""

from ..config import MoEConfig
from .data_parallel import wrap_data_parallel
from .dispatcher import ExpertRows, dispatch_and_combine
from .experts import Experts
from .layer import MoELayer
from .router import CosineGate, LinearGate, make_gate, route
from .routing import Routing
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
    "Routing",
    "dispatch_and_combine",
    "make_gate",
    "route",
    "wrap_data_parallel",
]
