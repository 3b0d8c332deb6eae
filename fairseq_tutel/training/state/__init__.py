"""What is saved of a model with experts: sets, optimizer state, full state."""

from ...checkpoint import AllRanks
from ...distributed import gather_texts, process_world


def all_ranks() -> AllRanks:
    """The ranks of this process's run, for :mod:`fairseq_tutel.checkpoint`."""
    return AllRanks(*process_world(), gather_texts)
