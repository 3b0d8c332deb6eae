"""How rows travel between the ranks of a layer: one algorithm per file, chosen by name.

To add one, subclass :class:`Exchange` in a file of its own: ``move`` says how rows travel,
``partitions`` which process groups that takes, ``predict`` how long it lasts. Decorate the class
with ``register_exchange("name")``. What wraps an exchange (timing, simulation) works with each.
"""

from .auto import AutoExchange
from .base import Codec, Exchange, Leg, Links, Parts, Wrapper, chunk_edges
from .build import build_exchange, build_flows
from .linear import LinearExchange
from .local import LocalCopy, NoExchange
from .pairwise import PairwiseExchange
from .registry import register_exchange
from .tickets import Flight, Ticket, send, start
from .timed import TimedExchange
from .two_dimensional import TwoDimensionalExchange

__all__ = [
    "AutoExchange",
    "Codec",
    "Exchange",
    "Flight",
    "Leg",
    "LinearExchange",
    "Links",
    "LocalCopy",
    "NoExchange",
    "PairwiseExchange",
    "Parts",
    "Ticket",
    "TimedExchange",
    "TwoDimensionalExchange",
    "Wrapper",
    "build_exchange",
    "build_flows",
    "chunk_edges",
    "register_exchange",
    "send",
    "start",
]
