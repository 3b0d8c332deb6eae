"""Reading a set of any number of ranks as the state that one rank of any other number needs.

Nothing here writes: a job may evaluate a checkpoint while another one trains and saves to it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .commit import visible_files
from .errors import Agree, CheckpointError, Ranks
from .io import identity, load_file
from .layout import (
    MERGED,
    SHARED,
    CheckpointSet,
    Role,
    check_divisible,
    check_same_shapes,
    expert_shapes,
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
    join_state,
    optimizer_is_named,
    split_state,
)

logger = logging.getLogger(__name__)

_ATTEMPTS = 10  # how often to read while another job keeps replacing the files


def load_for_rank(
    path: str,
    *,
    rank: int,
    world_size: int,
    with_optimizer: bool = True,
    agree: Agree | None = None,
) -> dict[str, Any]:
    """The state that rank `rank` of `world_size` needs, from whatever `path` names.

    Reads sets saved by any number of ranks, merged files, dense checkpoints without experts, and
    the files that Meta published (`model-shared.pt`, `model-rank-N.pt`). Only the needed rank files
    are opened, and memory-mapped. A save that was interrupted after its commit is read as complete.

    Args:
        path: X.pt, X-shared.pt, X-rank-N.pt, or a merged file.
        rank, world_size: where the experts will live; W = 1 loads all of them.
        with_optimizer: also assemble `last_optimizer_state`.
        agree: if given, all ranks call this together and an error on one is raised on all.

    Returns:
        fairseq's state dict: `model` with the dense keys and this rank's experts numbered from 0,
        `last_optimizer_state` likewise by name (absent if not stored, not wanted or not ours), the
        common entries, and `moe_checkpoint`, the metadata of the source (None for Meta's files).

    Raises:
        CheckpointError: names the file that is missing, truncated or foreign, or E and W if the
            experts cannot be placed.
    """
    loaded: list[dict[str, Any]] = []

    def read() -> str:
        loaded.append(_read_stable(path, rank, world_size, with_optimizer))
        metadata = loaded[0][METADATA]
        return metadata["save_id"] if metadata else ""

    if agree is None:
        read()
        return loaded[0]
    save_ids = Ranks(rank, world_size, agree).together(f"loading {path}", read)
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
        CheckpointError: see `load_for_rank`; a missing rank file is told at once.
    """

    def __init__(self, path: str) -> None:
        self.cset, self.files, self.kind = locate(path)
        self._open: tuple[int, dict[str, Any]] | None = None
        self._shapes: dict[str, tuple] | None = None
        if self.kind == MERGED:
            self._read_merged()
        else:
            self._read_shared()

    def experts(self, wanted: range) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Tensors and optimizer state of some experts, numbered from 0.

        Args:
            wanted: global expert numbers.

        Returns:
            (model entries, named optimizer state or None if there is none).
        """
        model: dict[str, Any] = {}
        named_state: dict[str, Any] = {}
        if not wanted:
            return model, named_state if self.has_optimizer else None
        per_file = self.num_experts // self.num_rank_files
        for number in range(wanted.start // per_file, (wanted.stop - 1) // per_file + 1):
            content = self.rank_content(number)
            first = number * per_file
            model |= slice_experts(content[MODEL], first=first, wanted=wanted)
            if self.has_optimizer:
                stored = content[OPTIMIZER][NAMED_STATE]
                named_state |= slice_experts(stored, first=first, wanted=wanted)
        return model, named_state if self.has_optimizer else None

    def state_of(self, wanted: range, *, with_optimizer: bool) -> dict[str, Any]:
        """Dense parameters and some experts as one state."""
        model, named_state = self.experts(wanted)
        return join_state(self.shared, model, named_state if with_optimizer else None)

    def rank_content(self, number: int) -> dict[str, Any]:
        """Checked content of one rank file; the last one stays open."""
        if self._open is None or self._open[0] != number:
            self._open = None  # let go of the previous file before mapping the next
            self._open = (number, self._read_rank(number))
        return self._open[1]

    def _read_merged(self) -> None:
        path = self.files[MERGED]
        state = _load_state(path)
        self.metadata = SetMetadata.of_state(state, path)
        self.has_optimizer = _drop_foreign_optimizer(state, path)
        self.shared, content = split_state(state)
        self.num_experts, self._shapes = expert_shapes(content[MODEL], path)
        gates = gate_experts(self.shared[MODEL], content[MODEL])
        expected = self.metadata.num_experts if self.metadata else gates
        if expected not in (None, self.num_experts):
            raise CheckpointError(
                f"{path}: holds {self.num_experts} experts but was written for {expected}; if it "
                "was saved by one rank of several, only a set of all ranks' files has them all"
            )
        self.num_rank_files = 1
        self._open = (0, content)

    def _read_shared(self) -> None:
        path = self.files[SHARED]
        self.shared = _load_state(path)
        misplaced = split_dense_expert(self.shared[MODEL])[1]
        if misplaced:
            raise CheckpointError(f"{path}: a shared file cannot hold {next(iter(misplaced))!r}")
        self.metadata = SetMetadata.of_state(self.shared, path)
        self.has_optimizer = _drop_foreign_optimizer(self.shared, path)
        if self.metadata is not None:
            self.num_experts = self.metadata.num_experts
            self.num_rank_files = self.metadata.num_rank_files
            self._check_shared_metadata(path)
        else:
            self.num_experts, self.num_rank_files = self._count_unmarked()
        self._require_rank_files()

    def _check_shared_metadata(self, path: str) -> None:
        if self.metadata.rank is not None or not 1 <= self.num_rank_files <= self.num_experts:
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
        state = _load_state(self.files[ranks[0]])
        local = expert_shapes(split_dense_expert(state[MODEL])[1], self.files[ranks[0]])[0]
        if local == 0:
            raise CheckpointError(f"{self.files[ranks[0]]}: holds no expert")
        experts = gate_experts(self.shared[MODEL], state[MODEL]) or present * local
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

    def _read_rank(self, number: int) -> dict[str, Any]:
        path = self.files[number]
        content = _load_state(path)
        self._check_membership(path, number, SetMetadata.of_state(content, path))
        dense = [key for key in content[MODEL] if split_key(key) is None]
        if dense:
            raise CheckpointError(f"{path}: a rank file cannot hold the dense {dense[0]!r}")
        count, shapes = expert_shapes(content[MODEL], path)
        per_file = self.num_experts // self.num_rank_files
        if count != per_file:
            raise CheckpointError(f"{path}: holds {count} experts, expected {per_file}")
        self._shapes = self._shapes or shapes
        check_same_shapes(shapes, self._shapes, path, "another rank file of the set")
        if self.has_optimizer and not optimizer_is_named(content.get(OPTIMIZER)):
            raise CheckpointError(f"{path}: lacks the optimizer state that the shared file has")
        return content

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


def _read_stable(path: str, rank: int, world_size: int, with_optimizer: bool) -> dict[str, Any]:
    """Read; if the files changed meanwhile (another job saved), read the new ones instead."""
    for attempt in range(_ATTEMPTS):
        before = _fingerprint(path)
        try:
            return _read(path, rank, world_size, with_optimizer)
        except CheckpointError:
            if attempt == _ATTEMPTS - 1 or _fingerprint(path) == before:
                raise
            logger.info("%s was replaced while it was read; reading it again", path)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _read(path: str, rank: int, world_size: int, with_optimizer: bool) -> dict[str, Any]:
    reader = SetReader(path)
    wanted = range(0)
    if reader.num_experts:
        try:
            check_divisible(reader.num_experts, world_size)
        except CheckpointError as error:
            raise CheckpointError(f"{reader.cset.path}: {error}") from error
        wanted = experts_of_rank(rank, world_size, reader.num_experts)
    state = reader.state_of(wanted, with_optimizer=with_optimizer and reader.has_optimizer)
    state[METADATA] = reader.metadata.to_dict() if reader.metadata else None
    return state


def _fingerprint(path: str) -> dict[str, tuple[int, ...] | None]:
    """Tells whether anything was replaced or renamed between two calls."""
    return {file: identity(file) for file in visible_files(CheckpointSet.from_path(path)).values()}


def locate(path: str) -> tuple[CheckpointSet, dict[Role, str], str]:
    """The set that `path` belongs to, its files as a reader must see them, "set" or "merged".

    Raises:
        CheckpointError: nothing of that name, a set without its shared file, or both a set and a
            merged file where `path` does not say which of them is meant.
    """
    cset = CheckpointSet.from_path(path)
    files = visible_files(cset)
    members = sorted(cset.name_of(role) for role in files if role != MERGED)
    if MERGED not in files and not members:
        raise CheckpointError(
            f"{path}: no such checkpoint: neither {cset.name_of(MERGED)} nor "
            f"{cset.name_of(SHARED)} is in {cset.directory or '.'}{_sharded_hint(cset)}"
        )
    if not members:
        return cset, files, MERGED
    if MERGED in files and os.path.basename(path) == cset.name_of(MERGED):
        raise CheckpointError(
            f"{path}: ambiguous: there is a merged file of that name and a set ({members[0]}, "
            f"...); name {cset.name_of(SHARED)} to read the set, or move one of them away"
        )
    if SHARED not in files:
        raise CheckpointError(f"{cset.shared_path}: missing, but its rank files are there")
    return cset, files, "set"


def find_checkpoint(path: str) -> tuple[str, str] | None:
    """What `path` names, for a program that knows single files; None if there is nothing.

    Returns:
        ("set", its shared file) or ("merged", the file), whose name may be a temporary one in the
        middle of a commit; :func:`.commit.final_path` gives the other.

    Raises:
        CheckpointError: see :func:`locate`.
    """
    if not path.endswith(".pt") or not visible_files(CheckpointSet.from_path(path)):
        return None
    _, files, kind = locate(path)
    return kind, files[MERGED if kind == MERGED else SHARED]


def _sharded_hint(cset: CheckpointSet) -> str:
    """Meta's fully-sharded runs wrote files of other names, which hold pieces of flat tensors."""
    directory = cset.directory or "."
    names = os.listdir(directory) if os.path.isdir(directory) else []
    shards = sorted(n for n in names if n.startswith(f"{cset.stem}-") and "-shard" in n)
    shards = [name for name in shards if name != cset.name_of(SHARED)]
    if not shards:
        return ""
    return (
        f"; {shards[0]} is a fully-sharded (FSDP) file, which must first be consolidated with "
        "consolidate_fsdp_shards of the code that wrote it"
    )


def _load_state(path: str) -> dict[str, Any]:
    state = load_file(path)
    if not isinstance(state.get(MODEL), dict):
        raise CheckpointError(f"{path}: not a fairseq checkpoint: has no {MODEL!r} dict")
    return state


def _drop_foreign_optimizer(state: dict[str, Any], path: str) -> bool:
    """Whether `state` has optimizer state in our form; any other is removed from it."""
    optimizer = state.get(OPTIMIZER)
    if optimizer_is_named(optimizer):
        return True
    if optimizer is not None:
        logger.warning(
            "%s: its optimizer state is not keyed by parameter name; loading without it", path
        )
    state.pop(OPTIMIZER, None)
    return False
