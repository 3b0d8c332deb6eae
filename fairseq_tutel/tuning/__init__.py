"""Which exchange is fastest, found out while training: state machines on integers.

No torch, no clock, no communication: whoever uses this gives it times and tables, and gets choices
(see :mod:`fairseq_tutel.hosts.exchange_tuner`).
"""

from .space import Axis, Choice, Space
from .store import Pinned, dump, load
from .tuner import WINDOW, Event, Key, Order, Tuner

__all__ = [
    "WINDOW",
    "Axis",
    "Event",
    "Key",
    "Order",
    "Pinned",
    "Choice",
    "Space",
    "Tuner",
    "dump",
    "load",
]
