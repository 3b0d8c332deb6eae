"""Read a checkpoint of any kind, checked, for loading, resharding and inspecting.

Nothing here writes: a job may evaluate a checkpoint while another job trains and saves to it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import layout
from .all_ranks import AllRanks, GatherTexts
from .index import read_index, unless_replaced, visible_files
from .io import Checksums, load_file
from .layout import MERGED, SHARED, CheckpointError, CheckpointSet, Role
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
    options_of,
    split_state,
)

logger = logging.getLogger(__name__)


def load_for_rank(
    path: str,
    *,
    rank: int,
    world_size: int,
    expert_parallel_size: int = 0,
    with_optimizer: bool = True,
    check_experts: bool = True,
    gather_texts: GatherTexts | None = None,
) -> dict[str, Any]:
    """Load the state that rank ``rank`` of ``world_size`` needs from a checkpoint of any kind.

    The checkpoint is a set saved by any number of ranks, a merged file, a dense checkpoint without
    experts, or files that Meta published. Only the needed rank files are opened, and memory-mapped.

    Args:
        path: X.pt, X-shared.pt, X-rank-N.pt, or a merged file.
        rank, world_size: place of the experts; W = 1 loads all of them.
        expert_parallel_size: P, ranks that hold all experts between them; 0: min(E, W).
        with_optimizer: also assemble ``last_optimizer_state``, if it is keyed by parameter name.
        check_experts: compare experts with their checksums, which reads them.
        gather_texts: if given, all ranks call this together, and an error on one is raised on all.

    Returns:
        The state of ``state.py`` with this rank's experts numbered from 0, and ``moe_checkpoint``,
        the metadata of the source (None for Meta's files).

    Raises:
        CheckpointError: names the file that is missing, damaged or foreign, or E and W that do
            not fit.
    """

    def read() -> dict[str, Any]:
        reader = SetReader(path, check_experts=check_experts)
        wanted = range(0)
        if reader.num_experts:
            try:
                wanted = layout.experts_of_rank(
                    rank, world_size, reader.num_experts, expert_parallel_size
                )
            except CheckpointError as error:
                raise CheckpointError(f"{reader.cset.path}: {error}") from error
        state = reader.state_of(wanted, with_optimizer=with_optimizer)
        return {**state, METADATA: reader.metadata and asdict(reader.metadata)}

    named = CheckpointSet.from_path(path).path
    if gather_texts is None:
        return unless_replaced(named, read)
    loaded: dict[str, Any] = {}

    def read_and_tell() -> str:
        loaded.update(unless_replaced(named, read))
        return (loaded[METADATA] or {}).get("save_id", "")

    ranks = AllRanks(rank, world_size, gather_texts)
    save_ids = ranks.run_on_all_ranks(f"loading {path}", read_and_tell)
    if len(set(save_ids)) > 1:
        raise CheckpointError(f"{path}: ranks read different saves {save_ids}; try again")
    return loaded


def read_set(path: str) -> SetReader:
    """Open a set of any number of ranks, or a merged or dense file."""
    return SetReader(path)


class SetReader:
    """An open checkpoint; :func:`read_set` returns it.

    Tensors are mapped. Rank files are opened one at a time. CheckpointError names a file that is
    missing, damaged or foreign.

    Attributes:
        cset, kind: location of X.pt; "set" or "merged".
        members, files: location of the files in Meta's layout, which an index names; the files.
        shared: state without experts. :meth:`shared_state` compares its checksums, this does not.
        metadata: metadata of the save; None if another program wrote it.
        num_experts: E, 0 for a dense model.
        num_rank_files: P, 1 for a merged file.
        has_optimizer: whether there is optimizer state keyed by parameter name.
        check_experts: whether experts are compared with their checksums, which reads them.
    """

    def __init__(self, path: str, *, check_experts: bool = True) -> None:
        self.cset = CheckpointSet.from_path(path)
        self.members, self.files, self.kind = locate(path)
        self.check_experts = check_experts
        self._open: tuple[int, dict[str, Any], Checksums] | None = None
        self._forms: dict[str, Mapping[str, str]] = {}  # of experts: in MODEL, in OPTIMIZER
        self.main_path = self.files[MERGED if self.kind == MERGED else SHARED]
        state, self._checksums = load_state(self.main_path)
        self.metadata = SetMetadata.of_state(state, self.main_path)
        # our own files are complete, unless they were spoilt; others' may have another use
        if self.metadata is not None and is_of_fairseq(state):
            check_complete(state, self.main_path)
        self.has_optimizer = optimizer_is_named(state.get(OPTIMIZER))
        if not self.has_optimizer and state.pop(OPTIMIZER, None) is not None:
            text = "%s: its optimizer state is not keyed by parameter name; loading without it"
            logger.warning(text, self.main_path)
        if self.kind == MERGED:
            self._read_merged(state)
        else:
            self._read_shared(state)

    @property
    def world_size(self) -> int:
        """Ranks of the run that saved the set; a step of that run read one batch per rank."""
        if self.metadata is not None:
            return self.metadata.world_size
        if self.num_experts:  # of Meta's runs
            return self.num_rank_files
        return options_of(self.shared, "distributed_training").get("distributed_world_size") or 1

    def shared_state(self, *, with_optimizer: bool = True) -> dict[str, Any]:
        """Return a copy of ``shared``, checked for damage."""
        left_out = {METADATA} if with_optimizer else {METADATA, OPTIMIZER}
        shared = {key: value for key, value in self.shared.items() if key not in left_out}
        self._checksums.check(shared)
        return shared

    def experts(
        self, wanted: range, *, with_optimizer: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tensors and optimizer state (or {}) of these experts by name, numbered from 0."""
        model: dict[str, Any] = {}
        named_state: dict[str, Any] = {}
        if not wanted:
            return model, named_state
        per_file = self.num_experts // self.num_rank_files
        for number in range(wanted.start // per_file, (wanted.stop - 1) // per_file + 1):
            content, checksums = self.rank_file(number)
            parts = [(content[MODEL], model)]
            if self.has_optimizer and with_optimizer:
                parts.append((content[OPTIMIZER][NAMED_STATE], named_state))
            for stored, taken in parts:
                new = layout.select_experts(stored, first=number * per_file, wanted=wanted)
                if self.check_experts:
                    checksums.check(new)
                taken.update(new)
        return model, named_state

    def state_of(self, wanted: range, *, with_optimizer: bool = True) -> dict[str, Any]:
        """Return dense parameters and some experts as one state, checked for damage."""
        shared = self.shared_state(with_optimizer=with_optimizer)
        return join_state(shared, *self.experts(wanted, with_optimizer=with_optimizer))

    def rank_file(self, number: int) -> tuple[dict[str, Any], Checksums]:
        """Return the content of one rank file, checked to be of this set; keep it open."""
        if self._open is None or self._open[0] != number:
            self._open = None  # let go of the previous file before mapping the next
            path = self.files[number]
            content, checksums = load_state(path)
            self._check_membership(path, number, SetMetadata.of_state(content, path))
            self._check_experts(content, path)
            self._open = (number, content, checksums)
        return self._open[1:]

    def _read_merged(self, state: dict[str, Any]) -> None:
        path = self.main_path
        self.shared, content = split_state(state)
        self.num_experts, self.num_rank_files = layout.expert_forms(content[MODEL], path)[0], 1
        gates = layout.gate_experts(self.shared[MODEL], content[MODEL], null_experts(state))
        expected = self.metadata.num_experts if self.metadata else gates
        if expected not in (None, self.num_experts):
            raise CheckpointError(
                f"{path}: holds {self.num_experts} experts but was written for {expected}; if it "
                "was saved by one rank of several, only a set of all ranks' files has them all"
            )
        if self.num_experts:
            self._check_experts(content, path)
        self._open = (0, content, self._checksums)

    def _read_shared(self, state: dict[str, Any]) -> None:
        self.shared = state
        misplaced = layout.split_dense_expert(state[MODEL])[1]
        if misplaced:
            expert = next(iter(misplaced))
            raise CheckpointError(f"{self.main_path}: a shared file cannot hold {expert!r}")
        own = self.metadata
        experts, count = (own.num_experts, own.num_rank_files) if own else self._count()
        if own and (own.rank is not None or not 1 <= count <= experts or experts % count):
            raise CheckpointError(
                f"{self.main_path}: foreign file: it is marked as rank file {own.rank} of "
                f"{count} with {experts} experts, not as a shared file"
            )
        self.num_experts, self.num_rank_files = experts, count
        if own is None:  # a replica may stand in for a missing file
            for role in sorted(role for role in self.files if isinstance(role, int)):
                self.files.setdefault(role % count, self.files[role])
        missing = [self.members.name_of(rank) for rank in range(count) if rank not in self.files]
        if missing:
            raise CheckpointError(
                f"{self.cset.path}: {len(missing)} of {count} rank files missing: "
                f"{', '.join(missing)}; copy them beside {self.members.name_of(SHARED)}"
            )

    def _count(self) -> tuple[int, int]:
        """Return E and the number of files to read, for a set without our metadata (Meta's)."""
        ranks = sorted(role for role in self.files if isinstance(role, int))
        if not ranks:
            raise CheckpointError(f"{self.members.path_of(0)}: missing: the set has no rank file")
        first, present = self.files[ranks[0]], ranks[-1] + 1
        model = layout.split_dense_expert(load_state(first)[0][MODEL])[1]
        local = layout.expert_forms(model, first)[0]
        if local == 0:
            raise CheckpointError(f"{first}: holds no expert")
        gates = layout.gate_experts(self.shared[MODEL], model, null_experts(self.shared))
        experts = gates or present * local
        # there may be more files: if experts are fewer than ranks, Meta's runs wrote replicas
        return experts, max(experts // local, 1)

    def _check_experts(self, content: dict[str, Any], path: str) -> None:
        """Check that a rank file has E/P experts of the other files' form; their state, too."""
        per_file = self.num_experts // self.num_rank_files
        parts = [(MODEL, path, content[MODEL], {per_file})]
        if self.has_optimizer:
            if not optimizer_is_named(content.get(OPTIMIZER)):
                raise CheckpointError(f"{path}: lacks the optimizer state that the shared file has")
            named_state = content[OPTIMIZER][NAMED_STATE]
            parts.append((OPTIMIZER, f"{path}: optimizer state", named_state, {0, per_file}))
        for part, where, entries, counts in parts:
            count, forms = layout.expert_forms(entries, where)
            if count not in counts:
                raise CheckpointError(f"{where}: holds {count} experts, expected {per_file}")
            layout.check_same(
                forms, self._forms.setdefault(part, forms), where, "another file of the set"
            )
        if str(options_of(self.shared).get("moe_router") or "linear") in ("linear", "cosine"):
            outputs = self.num_experts + null_experts(self.shared)
            layout.check_gates(self.shared[MODEL], content[MODEL], outputs, self.main_path)

    def _check_membership(self, path: str, number: int, metadata: SetMetadata | None) -> None:
        """Check that a rank file comes from the same save, for the same place."""
        save_ids = [found.save_id if found else None for found in (metadata, self.metadata)]
        if save_ids[0] != save_ids[1]:
            mine, shared = (f"save {i}" if i else f"a save without {METADATA!r}" for i in save_ids)
            other = f"{self.members.name_of(SHARED)} is of {shared}"
            raise CheckpointError(f"{path}: stale or foreign: it is of {mine}, but {other}")
        place = (number, self.num_rank_files)
        if metadata is not None and (metadata.rank, metadata.num_rank_files) != place:
            raise CheckpointError(
                f"{path}: foreign file: it was saved as rank file {metadata.rank} of "
                f"{metadata.num_rank_files}, not as {number} of {self.num_rank_files}"
            )


def locate(path: str) -> tuple[CheckpointSet, dict[Role, str], str]:
    """Return the place and files of a set in Meta's layout, or of a merged file, and which it is.

    CheckpointError if ``path`` names neither.
    """
    cset = CheckpointSet.from_path(path)
    if (members := read_index(cset)) is not None:
        if SHARED not in (files := members.files()):
            raise CheckpointError(
                f"{cset.path}: is an index without its files: {members.name_of(SHARED)} is not "
                f"beside it; copy and move a set with all files {cset.name_of(MERGED)}*"
            )
        return members, files, "set"
    files = visible_files(cset)
    members = sorted(cset.name_of(role) for role in files if role != MERGED)
    if MERGED not in files and not members:
        raise CheckpointError(
            f"{path}: no such checkpoint: neither {cset.name_of(MERGED)} nor "
            f"{cset.name_of(SHARED)} is in {cset.directory or '.'}"
        )
    if not members:
        return cset, files, MERGED
    if MERGED in files and os.path.basename(path) == cset.name_of(MERGED):
        raise CheckpointError(
            f"{path}: ambiguous: there is a merged file of that name and a set ({members[0]}, "
            f"...); name {cset.name_of(SHARED)} to read the set, or move one of them away"
        )
    if SHARED not in files:
        raise CheckpointError(f"{cset.path_of(SHARED)}: missing, but its rank files are there")
    files.pop(MERGED, None)
    return cset, files, "set"


def find_checkpoint(path: str) -> tuple[str, str] | None:
    """Return "set" or "merged", and a file that names it; None if nothing has that name."""
    if not path.endswith(".pt"):
        return None
    cset = CheckpointSet.from_path(path)
    if read_index(cset) is not None:  # another job may be replacing its files
        return "set", cset.path
    if not visible_files(cset):
        return None
    _, files, kind = locate(path)
    return kind, files[MERGED if kind == MERGED else SHARED]


def load_state(path: str) -> tuple[dict[str, Any], Checksums]:
    """Open a file of a checkpoint and check the kinds of its entries."""
    checksums = Checksums(path)
    state = load_file(path)
    check_file(state, path)
    if METADATA not in state:
        state = {**state, MODEL: layout.without_aliases(state[MODEL])}
    return state, checksums
