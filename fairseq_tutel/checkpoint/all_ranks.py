"""Steps that every rank takes or none; the caller brings the collective they need."""

from __future__ import annotations

from collections.abc import Callable

from .errors import CheckpointError

# all-gathers one short text per rank: text of this rank -> texts of all ranks, in rank order
GatherTexts = Callable[[str | None], list[str | None]]

_OK = "ok:"


class AllRanks:
    """Takes steps together, so that an error on one rank is an error on all and no rank waits.

    Args:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes that take part.
        gather_texts: all-gathers one short text (or None) per rank; None if there is one process.

    Raises:
        ValueError: rank outside the world, or several processes and no ``gather_texts``.
    """

    def __init__(self, rank: int, world_size: int, gather_texts: GatherTexts | None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
        if gather_texts is None and world_size > 1:
            raise ValueError(
                f"{world_size} ranks need `gather_texts`, a callable that gathers their errors"
            )
        self.rank = rank
        self.world_size = world_size
        self._gather_texts = gather_texts if gather_texts is not None else lambda text: [text]

    def together(self, what: str, action: Callable[[], str | None] | None = None) -> list[str]:
        """Run ``action`` on every rank and wait for the result of all.

        Args:
            what: names the step in the error message.
            action: returns a short text for the other ranks, or None; no action is a barrier.

        Returns:
            The texts of all ranks, in rank order ("" where there was none).

        Raises:
            CheckpointError: on every rank if the action failed on any; names ranks and errors.
        """
        failure: Exception | None = None
        text = _OK
        try:
            if action is not None:
                text = _OK + (action() or "")
        except Exception as error:  # whatever it is, the other ranks must raise it too
            failure = error
            text = str(error) if isinstance(error, CheckpointError) else _describe(error)
        gathered = self._gather_texts(text)
        if len(gathered) != self.world_size:
            raise CheckpointError(
                f"{what}: gather_texts() returned {len(gathered)} texts for {self.world_size} ranks"
            )
        errors = {
            rank: message if message is not None else "no answer"
            for rank, message in enumerate(gathered)
            if message is None or not message.startswith(_OK)
        }
        if errors:
            raise CheckpointError(_summary(what, errors, self.world_size)) from failure
        return [message[len(_OK) :] for message in gathered if message is not None]


def _summary(what: str, errors: dict[int, str], world_size: int) -> str:
    if world_size == 1:
        return f"{what} failed: {errors[0]}"
    ranks_of: dict[str, list[int]] = {}
    for rank, message in errors.items():
        ranks_of.setdefault(message, []).append(rank)
    errors_by_rank = "; ".join(
        f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in ranks_of.items()
    )
    return f"{what} failed on {len(errors)} of {world_size} ranks: {errors_by_rank}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
