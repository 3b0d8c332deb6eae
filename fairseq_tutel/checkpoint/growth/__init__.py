"""Change the number of experts of a checkpoint: from a dense model to experts, to more, to fewer.

Each command reads one checkpoint and writes another in one step. checkpoint/README.md says
which changes keep the function, and why.
"""

from .dense import to_dense
from .grow import grow, shrink
from .upcycle import Upcycling, upcycle

__all__ = ["Upcycling", "grow", "shrink", "to_dense", "upcycle"]
