"""The planner: what a training run needs and does, before a GPU is asked for.

Counts are formulas over a Hydra config (proven against models on the meta device), times come from
a hardware profile and are predictions. Imports omegaconf and, for figures, matplotlib; nothing of
torch or fairseq.
"""

from .hardware import Hardware, StepTime, load_hardware
from .memory import Memory, count_memory
from .parameters import Parameters, count_parameters
from .planner import ImpossiblePlan, Plan, check, ladder, make_plan
from .settings import Precision, Settings, load_config, read_settings, with_experts
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
