"""The planner: what a training run needs and does, before a GPU is asked for.

Hydra composes the configuration, parameters are counted on the model itself (on the meta device).
Memory, work and traffic are formulas, proven against measured runs; times come from a hardware
profile and are predictions.
"""

from .choose import best_plan
from .compose import load_config
from .hardware import Hardware, load_hardware
from .memory import Memory, count_memory
from .parameters import Parameters, count_parameters
from .planner import ImpossiblePlan, Plan, check, ladder, make_plan
from .settings import Precision, Settings, read_settings, with_experts
from .speed import StepTime
from .work import Work, count_work

__all__ = [
    "Hardware",
    "ImpossiblePlan",
    "Memory",
    "Parameters",
    "Plan",
    "Precision",
    "Settings",
    "StepTime",
    "Work",
    "best_plan",
    "check",
    "count_memory",
    "count_parameters",
    "count_work",
    "ladder",
    "load_config",
    "load_hardware",
    "make_plan",
    "read_settings",
    "with_experts",
]
