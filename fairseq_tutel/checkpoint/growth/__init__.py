"""Change the number of experts of a checkpoint: from a dense model to experts, to more, to fewer.

Each command reads one checkpoint and writes another. The source is only read, and the new set is
written in one step (:func:`..store.write_set`), so that a crash leaves the old files or the new
set::

    SetReader ── transform: shared state and experts of the new set ── Change.write

- :mod:`.upcycle`: make experts of the FFNs of a dense model.
- :mod:`.grow`: copy experts. :mod:`.shrink`: drop experts, or write a dense model.
- :mod:`.selection`: build a set whose experts are chosen from another set.
- :mod:`.load`: read the load of the experts from the log of the run.
- :mod:`.change`: write a transformed set; print the flags to train on with.
- :mod:`.history`: record each change in the set (``moe_growth``); bias of held back experts.

Programs call :func:`upcycle`, :func:`grow`, :func:`shrink` and :func:`to_dense`;
``python -m fairseq_tutel.checkpoint`` (:mod:`.commands`) is one. GROWTH.md beside this folder says
which changes keep the function, and why.
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
