"""Change the number of experts of a checkpoint: from a dense model to experts, to more, to fewer.

Each command reads one checkpoint and writes another. The source is only read, and the new set is
written in one step (:func:`..store.write_set`), so that a crash leaves the old files or the new
set::

    read_set ── shared state and experts of the new set ── write_change

- :mod:`.upcycle`: make experts of the FFNs of a dense model. :mod:`.dense`: the other way.
- :mod:`.mix`: compare and average several dense models, for :mod:`.upcycle`.
- :mod:`.grow`: copy or drop experts. :mod:`.selection`: which ones, by their load.
- :mod:`.change`: open a set; write the new one; print the flags to train on with.
- :mod:`.history`: record each change in the set (``moe_growth``); bias of held back experts.

Programs call :func:`upcycle`, :func:`grow`, :func:`shrink` and :func:`to_dense`;
``python -m fairseq_tutel.checkpoint`` (:mod:`.commands`) is one. GROWTH.md beside this folder says
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
