"""Growth: from a dense model to experts, from few experts to more, and back.

Each command is a pure transformation of the files of one checkpoint into those of another, which is
written as one thing (:func:`..store.write_set`): the source is only read, and a crash leaves what
there was, or the new set. Data flows one way::

    SetReader ── recipe: which expert of what ── Recombined: shared state, experts ── write_set

- :mod:`.upcycle`: FFNs of a dense model -> experts, by the function that ``replace_ffn`` makes them
  with (:func:`fairseq_tutel.distributed.experts_of_ffn`); the optimizer's state by
  :mod:`.dense_optimizer`.
- :mod:`.grow`: more experts, copies of what there is; :mod:`.shrink`: fewer, or a dense model.
- :mod:`.recipes` decides, from the experts' load and the router's rows, of which experts a new one
  is made; :mod:`.recombine` makes it, tensors and optimizer state alike, and reads no options.
- :mod:`.history`: what was done to a set, stored in it as ``moe_growth``; how far experts that a
  growth holds back have come in.

Whoever has a program of their own calls :func:`upcycle`, :func:`grow`, :func:`shrink` and
:func:`to_dense`; ``python -m fairseq_tutel.checkpoint`` (:mod:`.commands`) is one. Which is exact
and which is not, and why: GROWTH.md beside this folder.
"""

from .grow import grow
from .history import Growth, held_back, history_of
from .shrink import shrink, to_dense
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
]
