"""Steps that succeed on all ranks or fail on all; the caller provides the collective."""

from collections.abc import Callable
from dataclasses import dataclass

from .layout import CheckpointError

# all-gathers one short text per rank: text of this rank -> texts of all ranks, in rank order
GatherTexts = Callable[[str | None], list[str | None]]

_OK = "ok:"


@dataclass(frozen=True)
class AllRanks:
    """Runner of common steps: an error on one rank is raised on all, so that no rank waits.

    ValueError is raised for a rank outside the world, or several ranks without ``gather_texts``.
    """

    rank: int = 0
    world_size: int = 1
    gather_texts: GatherTexts | None = None

    def __post_init__(self):
        if not 0 <= self.rank < self.world_size or self.world_size > 1 and not self.gather_texts:
            place = f"rank {self.rank} of {self.world_size}"
            raise ValueError(f"{place}: ranks count from 0, and several need `gather_texts`")

    def run_on_all_ranks(self, what: str, action: Callable[[], str | None]) -> list[str]:
        """Run ``action`` on every rank; return the texts that it returned, in rank order.

        CheckpointError on every rank if it failed on any; the text begins with ``what``.
        """
        failure: Exception | None = None
        try:
            text = _OK + (action() or "")
        except Exception as error:  # whatever it is, the other ranks must raise it too
            failure = error
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            text = f"{name}{error}"
        texts = self.gather_texts(text) if self.gather_texts else [text]
        ranks_of: dict[str, list[str]] = {}
        for rank, found in enumerate(texts):
            if not found.startswith(_OK):
                ranks_of.setdefault(found, []).append(str(rank))
        if ranks_of and self.world_size == 1:
            raise CheckpointError(f"{what} failed: {text}") from failure
        if ranks_of:
            errors = "; ".join(f"rank {', '.join(r)}: {error}" for error, r in ranks_of.items())
            where = f"{sum(map(len, ranks_of.values()))} of {self.world_size} ranks"
            raise CheckpointError(f"{what} failed on {where}: {errors}") from failure
        return [found[len(_OK) :] for found in texts]

    def run_on_first(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait; errors as in :meth:`run_on_all_ranks`."""
        self.run_on_all_ranks(what, action if self.rank == 0 else lambda: None)
