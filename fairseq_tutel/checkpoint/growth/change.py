"""A transformed set, written in one step with its options and its history."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..layout import CheckpointError, count_rank_files
from ..reader import SetReader, read_set
from ..state import GROWTH, with_options
from ..store import Experts, write_set
from .history import Growth, refuse_while_held, with_entry

logger = logging.getLogger(__name__)

# entries of the run's state that are for one number of experts: sums of load, tuned exchanges
_FOR_NUM_EXPERTS = ("moe_expert_load", "moe_tuner")


@dataclass(frozen=True)
class Change:
    """Content of the new set.

    Attributes:
        source: the set that was read.
        shared: state without experts.
        experts: function that makes experts, see :func:`..store.write_set`.
        entry: what is recorded in the history.
        options: changes to the model's options, by fairseq's names; None removes an option.
        flags: further flags to train on with; None: those of ``options``.
    """

    source: SetReader
    shared: Mapping[str, Any]
    experts: Experts
    entry: Growth
    options: Mapping[str, Any]
    flags: Mapping[str, Any] | None = None

    def write(self, dst: str, ranks: int | None, **how: bool) -> str:
        """Write the set, and log the flags to train on with.

        Args:
            dst: X.pt of the new set.
            ranks: W; None: one merged file.
            how: ``force`` and ``in_place`` of :func:`..store.write_set`.

        Returns:
            The canonical path.
        """
        state = with_options(self.shared, self.options)
        if isinstance(extra := state.get("extra_state"), Mapping):
            kept = {name: each for name, each in extra.items() if name not in _FOR_NUM_EXPERTS}
            state["extra_state"] = kept
        state[GROWTH] = with_entry(state, self.entry)
        num_experts = self.entry.after
        if ranks is not None:
            try:
                count_rank_files(num_experts, ranks)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; --ranks chooses another number") from None
        written = write_set(
            dst, state, self.experts,
            num_experts=num_experts, num_ranks=ranks, source=self.source, **how,
        )  # fmt: skip
        if num_experts:
            flags = self.options if self.flags is None else self.flags
            words = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
            logger.info("train on with: %s", " ".join(words))
        return written


def open_sparse(path: str) -> SetReader:
    """Open a set with experts; raise CheckpointError if it has none, or some are held back."""
    source = read_set(path)
    if not source.num_experts:
        raise CheckpointError(f"{path}: is dense; `upcycle` makes experts of its FFNs")
    refuse_while_held(source.shared, path)
    return source


def ranks_of(source: SetReader, ranks: int | None) -> int | None:
    """Return W of the new set: ``ranks``, or as many as the source has rank files."""
    return ranks or (source.num_rank_files if source.kind == "set" else None)
