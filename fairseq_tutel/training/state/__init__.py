"""Saved state of a model with experts: sets of files, optimizer state, full state dicts."""

from ...checkpoint import AllRanks
from ...distributed import gather_texts, process_world


def all_ranks() -> AllRanks:
    """Return the ranks of this process's run, for :mod:`fairseq_tutel.checkpoint`."""
    return AllRanks(*process_world(), gather_texts)
