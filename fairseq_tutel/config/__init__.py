"""Frozen options of an MoE layer, with their ranges and rules.

The command line, Hydra configs, the layer and the planner build the same :class:`MoEConfig`,
:class:`ExchangeConfig` and :class:`ExpertConfig`.
"""

from .exchange import EXPERT_PLACEMENTS, OVERLAP_DEGREES, ExchangeConfig, exchange_size
from .experts import ExpertConfig
from .force_load import share_ends
from .formats import STORED_FORMATS, WIRE_FORMATS, WIRES
from .growth import GrowAt
from .options import OptionError, above, at_least, option
from .presets import GATE_LOSS_WEIGHTS, PRESETS, with_preset
from .registry import EXCHANGES, EXPERTS, ROUTERS, Options
from .routing import EXPERT_GRAD_NORMALIZATIONS, MoEConfig

__all__ = [
    "EXCHANGES",
    "EXPERTS",
    "GATE_LOSS_WEIGHTS",
    "PRESETS",
    "ROUTERS",
    "ExchangeConfig",
    "ExpertConfig",
    "MoEConfig",
    "OptionError",
    "Options",
    "above",
    "at_least",
    "option",
    "with_preset",
]
