"""Options of an MoE layer and the rules that make them consistent.

Command line, Hydra configs, stand-alone layer and planner all build a :class:`MoEConfig` and an
:class:`ExchangeConfig`. Standard library only: it is read where torch and fairseq are missing.
"""

from .exchange import EXPERT_PLACEMENTS, OVERLAP_DEGREES, WIRES, ExchangeConfig, exchange_size
from .growth import GrowAt
from .options import OptionError, above, at_least, option
from .registry import EXCHANGES, EXPERTS, ROUTERS, Options
from .routing import EXPERT_GRAD_NORMALIZATIONS, MoEConfig
