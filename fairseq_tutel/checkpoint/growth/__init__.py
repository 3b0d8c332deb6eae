"""Change the number of experts of a checkpoint: from a dense model to experts, to more, to fewer.

Each command reads one checkpoint and writes another in one step. GROWTH.md beside this folder says
which changes keep the function, and why.
"""

from .dense import to_dense
from .grow import grow, shrink, why_inexact
from .history import Growth, held_back, history_of
from .upcycle import Upcycling, upcycle

__all__ = [
    "Growth",
    "Upcycling",
    "grow",
    "held_back",
    "history_of",
    "shrink",
    "to_dense",
    "upcycle",
    "why_inexact",
]
