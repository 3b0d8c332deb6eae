"""Reading a set of any number of ranks as the state that one rank of any other number needs.

Nothing here writes: a job may evaluate a checkpoint while another one trains and saves to it.
"""

from __future__ import annotations

import logging
from typing import Any

from .all_ranks import AllRanks, GatherTexts
from .checksums import Checksums
from .commit import visible_files
from .errors import CheckpointError
from .find import locate
from .io import identity, load_file
from .layout import (
    MERGED,
    SHARED,
    CheckpointSet,
    check_same,
    expert_shapes,
    expert_states,
    experts_of_rank,
    gate_experts,
    slice_experts,
    split_dense_expert,
    split_key,
)
from .state import (
    METADATA,
    MODEL,
    NAMED_STATE,
    OPTIMIZER,
    SetMetadata,
    check_complete,
    check_file,
    is_of_fairseq,
    join_state,
    null_experts,
    optimizer_is_named,
    split_state,
)

logger = logging.getLogger(__name__)

_OTHER_FILE = "another rank file of the set"
_ATTEMPTS = 30  # how often to read while another job keeps replacing the files


def load_for_rank(
    path: str,
    *,
    rank: int,
    world_size: int,
    expert_parallel_size: int = 0,
    with_optimizer: bool = True,
    gather_texts: GatherTexts | None = None,
) -> dict[str, Any]:
    """The state that rank ``rank`` of ``world_size`` needs, from whatever ``path`` names.

    Reads sets saved by any number of ranks, merged files, dense checkpoints without experts, and
    the files that Meta published (``model-shared.pt``, ``model-rank-N.pt``). Only the needed rank
    files are opened, and memory-mapped. A save that was interrupted after its commit is read as
    complete.

    Args:
        path: X.pt, X-shared.pt, X-rank-N.pt, or a merged file.
        rank, world_size: where the experts will live; W = 1 loads all of them.
        expert_parallel_size: S, ranks that hold all experts between them; 0: min(E, W).
        with_optimizer: also assemble ``last_optimizer_state``.
        gather_texts: if given, all ranks call this together and an error on one is raised on all.

    Returns:
        fairseq's state dict: ``model`` with the dense keys and this rank's experts numbered from 0,
        ``last_optimizer_state`` likewise by name (absent if not stored, not wanted or not ours),
        the common entries, and ``moe_checkpoint``, the metadata of the source (None for Meta's
        files).

    Raises:
        CheckpointError: names the file that is missing, truncated or foreign, or E and W if the
            experts cannot be placed.
    """
    loaded: list[dict[str, Any]] = []

    def read() -> str:
        loaded.append(_read_stable(path, (rank, world_size, expert_parallel_size), with_optimizer))
        metadata = loaded[0][METADATA]
        return metadata["save_id"] if metadata else ""

    if gather_texts is None:
        read()
        return loaded[0]
    save_ids = AllRanks(rank, world_size, gather_texts).together(f"loading {path}", read)
    if len(set(save_ids)) > 1:
        raise CheckpointError(
            f"{path}: ranks read different saves {save_ids}; it was replaced meanwhile, try again"
        )
    return loaded[0]


class SetReader:
    """An open checkpoint: the shared content in memory, rank files opened one at a time.

    Attributes:
        cset: where it is; kind: "set" or "merged"; shared: content of the shared file (of a merged
        file: its dense part), optimizer state in our form or absent; metadata: None if not ours;
        num_experts: E, 0 for a dense model; num_rank_files; has_optimizer.

    Raises:
        CheckpointError: see ``load_for_rank``; a missing rank file is reported at once.
    """

    def __init__(self, path: str) -> None:
        self.cset, self.files, self.kind = locate(path)
        self._open: tuple[int, dict[str, Any], Checksums] | None = None
        self._shapes: dict[str, str] | None = None
        self._states: dict[str, str] | None = None
        if self.kind == MERGED:
            self._read_merged()
        else:
            self._read_shared()

    def experts(
        self, wanted: range, *, with_optimizer: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and optimizer state of some experts, numbered from 0, checked for damage.

        Args:
            wanted: global expert numbers.

        Returns:
            (model entries, named optimizer state, empty if there is none or it is not wanted).
        """
        model: dict[str, Any] = {}
        named_state: dict[str, Any] = {}
        if not wanted:
            return model, named_state
        per_file = self.num_experts // self.num_rank_files
        for number in range(wanted.start // per_file, (wanted.stop - 1) // per_file + 1):
            _, content, checksums = self._open_rank(number)
            parts = [(content[MODEL], model)]
            if self.has_optimizer and with_optimizer:
                parts.append((content[OPTIMIZER][NAMED_STATE], named_state))
            for stored, taken in parts:
                new = slice_experts(stored, first=number * per_file, wanted=wanted)
                checksums.check(new)
                taken.update(new)
        return model, named_state

    def state_of(self, wanted: range, *, with_optimizer: bool) -> dict[str, Any]:
        """Dense parameters and some experts as one state, checked for damage."""
        with_optimizer = with_optimizer and self.has_optimizer
        shared = dict(self.shared)
        if not with_optimizer:
            shared.pop(OPTIMIZER, None)
        self._checksums.check(shared)
        model, named_state = self.experts(wanted, with_optimizer=with_optimizer)
        return join_state(shared, model, named_state if with_optimizer else None)

    def rank_content(self, number: int) -> dict[str, Any]:
        """Content of one rank file, checked to be of this set; the last one stays open."""
        return self._open_rank(number)[1]

    def _open_rank(self, number: int) -> tuple[int, dict[str, Any], Checksums]:
        if self._open is None or self._open[0] != number:
            self._open = None  # let go of the previous file before mapping the next
            self._open = (number, *self._read_rank(number))
        return self._open

    def _read_merged(self) -> None:
        path = self.files[MERGED]
        state, self._checksums = load_state(path)
        self.metadata = SetMetadata.of_state(state, path)
        self._check_entries(state, path)
        self.has_optimizer = _drop_foreign_optimizer(state, path)
        self.shared, content = split_state(state, path)
        self.num_experts, self._shapes = expert_shapes(content[MODEL], path)
        gates = gate_experts(self.shared[MODEL], content[MODEL], null_experts(state))
        expected = self.metadata.num_experts if self.metadata else gates
        if expected not in (None, self.num_experts):
            raise CheckpointError(
                f"{path}: holds {self.num_experts} experts but was written for {expected}; if it "
                "was saved by one rank of several, only a set of all ranks' files has them all"
            )
        self.num_rank_files = 1
        if self.has_optimizer and self.num_experts:
            self._check_optimizer(content, path)
        self._open = (0, content, self._checksums)

    def _read_shared(self) -> None:
        path = self.files[SHARED]
        self.shared, self._checksums = load_state(path)
        misplaced = split_dense_expert(self.shared[MODEL])[1]
        if misplaced:
            raise CheckpointError(f"{path}: a shared file cannot hold {next(iter(misplaced))!r}")
        self.metadata = SetMetadata.of_state(self.shared, path)
        self._check_entries(self.shared, path)
        self.has_optimizer = _drop_foreign_optimizer(self.shared, path)
        if self.metadata is not None:
            self.num_experts = self.metadata.num_experts
            self.num_rank_files = self.metadata.num_rank_files
            self._check_shared_metadata(path)
        else:
            self.num_experts, self.num_rank_files = self._count_unmarked()
        self._require_rank_files()

    def _check_entries(self, state: dict[str, Any], path: str) -> None:
        """Ours are complete, or were spoilt; what others made may be good for another use."""
        if self.metadata is not None and is_of_fairseq(state):
            check_complete(state, path)

    def _check_shared_metadata(self, path: str) -> None:
        sharded = 1 <= self.num_rank_files <= self.num_experts
        if self.metadata.rank is not None or not sharded or self.num_experts % self.num_rank_files:
            raise CheckpointError(
                f"{path}: foreign file: it is marked as rank file {self.metadata.rank} of "
                f"{self.num_rank_files} with {self.num_experts} experts, not as a shared file"
            )

    def _count_unmarked(self) -> tuple[int, int]:
        """E and the number of files to read, of a set without our metadata (Meta's)."""
        ranks = sorted(role for role in self.files if isinstance(role, int))
        if not ranks:
            raise CheckpointError(f"{self.cset.rank_path(0)}: missing: no rank file beside the set")
        present = ranks[-1] + 1
        state, _ = load_state(self.files[ranks[0]])
        local = expert_shapes(split_dense_expert(state[MODEL])[1], self.files[ranks[0]])[0]
        if local == 0:
            raise CheckpointError(f"{self.files[ranks[0]]}: holds no expert")
        nulls = null_experts(self.shared)
        experts = gate_experts(self.shared[MODEL], state[MODEL], nulls) or present * local
        replicated = local == 1 and present > experts and present % experts == 0
        if experts % local or (present * local > experts and not replicated):
            raise CheckpointError(
                f"{self.cset.path}: {present} rank files of {local} experts do not make the "
                f"{experts} experts that its gates choose from"
            )
        return experts, experts // local

    def _require_rank_files(self) -> None:
        wanted = range(self.num_rank_files)
        missing = [self.cset.name_of(rank) for rank in wanted if rank not in self.files]
        if missing:
            raise CheckpointError(
                f"{self.cset.path}: {len(missing)} of {self.num_rank_files} rank files missing: "
                f"{', '.join(missing)}; copy them beside {self.cset.name_of(SHARED)}"
            )

    def _read_rank(self, number: int) -> tuple[dict[str, Any], Checksums]:
        path = self.files[number]
        content, checksums = load_state(path)
        self._check_membership(path, number, SetMetadata.of_state(content, path))
        dense = [key for key in content[MODEL] if split_key(key) is None]
        if dense:
            raise CheckpointError(f"{path}: a rank file cannot hold the dense {dense[0]!r}")
        count, shapes = expert_shapes(content[MODEL], path)
        per_file = self.num_experts // self.num_rank_files
        if count != per_file:
            raise CheckpointError(f"{path}: holds {count} experts, expected {per_file}")
        self._shapes = self._shapes or shapes
        check_same(shapes, self._shapes, path, _OTHER_FILE)
        if self.has_optimizer:
            self._check_optimizer(content, path)
        return content, checksums

    def _check_optimizer(self, content: dict[str, Any], path: str) -> None:
        """Each expert must have what all others have; of a parameter that is not trained, none."""
        if not optimizer_is_named(content.get(OPTIMIZER)):
            raise CheckpointError(f"{path}: lacks the optimizer state that the shared file has")
        named_state = content[OPTIMIZER][NAMED_STATE]
        dense = [key for key in named_state if split_key(key) is None]
        if dense:
            raise CheckpointError(
                f"{path}: a rank file cannot hold state of the dense {dense[0]!r}"
            )
        count, states = expert_states(named_state, path)
        per_file = self.num_experts // self.num_rank_files
        if count not in (0, per_file):
            raise CheckpointError(
                f"{path}: has optimizer state of {count} experts, expected {per_file}"
            )
        self._states = states if self._states is None else self._states
        check_same(states, self._states, f"{path}: optimizer state", _OTHER_FILE)

    def _check_membership(self, path: str, number: int, metadata: SetMetadata | None) -> None:
        """A rank file must come from the same save, for the same place."""
        if metadata is None and self.metadata is None:
            return
        if metadata is None or self.metadata is None:
            marked, other = (SHARED, number) if metadata is None else (number, SHARED)
            raise CheckpointError(
                f"{path}: foreign file: {self.cset.name_of(other)} was not saved with "
                f"{self.cset.name_of(marked)} (it has no {METADATA!r} metadata)"
            )
        if metadata.save_id != self.metadata.save_id:
            raise CheckpointError(
                f"{path}: stale or foreign: it is of save {metadata.save_id}, but "
                f"{self.cset.name_of(SHARED)} is of save {self.metadata.save_id}"
            )
        if (metadata.rank, metadata.num_rank_files) != (number, self.num_rank_files):
            raise CheckpointError(
                f"{path}: foreign file: it was saved as rank file {metadata.rank} of "
                f"{metadata.num_rank_files}, not as {number} of {self.num_rank_files}"
            )


def _read_stable(path: str, place: tuple[int, int, int], with_optimizer: bool) -> dict[str, Any]:
    """Read; if the files changed meanwhile (another job saved), read the new ones instead."""
    for attempt in range(_ATTEMPTS):
        before = _fingerprint(path)
        try:
            return _read(path, *place, with_optimizer)
        except CheckpointError:
            if attempt == _ATTEMPTS - 1 or _fingerprint(path) == before:
                raise
            logger.info("%s was replaced while it was read; reading it again", path)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _read(
    path: str, rank: int, world_size: int, expert_parallel_size: int, with_optimizer: bool
) -> dict[str, Any]:
    reader = SetReader(path)
    wanted = range(0)
    if reader.num_experts:
        try:
            wanted = experts_of_rank(rank, world_size, reader.num_experts, expert_parallel_size)
        except CheckpointError as error:
            raise CheckpointError(f"{reader.cset.path}: {error}") from error
    state = reader.state_of(wanted, with_optimizer=with_optimizer)
    state[METADATA] = reader.metadata.to_dict() if reader.metadata else None
    return state


def _fingerprint(path: str) -> dict[str, tuple[int, ...] | None]:
    """Detects whether anything was replaced or renamed between two calls."""
    return {file: identity(file) for file in visible_files(CheckpointSet.from_path(path)).values()}


def load_state(path: str) -> tuple[dict[str, Any], Checksums]:
    """Open a file of a checkpoint, of which all entries have the kinds that readers rely on."""
    checksums = Checksums(path)
    state = load_file(path)
    check_file(state, path)
    return state, checksums


def _drop_foreign_optimizer(state: dict[str, Any], path: str) -> bool:
    """Whether ``state`` has optimizer state in our form; any other is removed from it."""
    optimizer = state.get(OPTIMIZER)
    if optimizer_is_named(optimizer):
        return True
    if optimizer is not None:
        logger.warning(
            "%s: its optimizer state is not keyed by parameter name; loading without it", path
        )
    state.pop(OPTIMIZER, None)
    return False
