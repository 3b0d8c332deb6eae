"""Saving, copying, removing and listing checkpoint sets, each as one thing.

``gather_texts`` brings the errors of one rank to all, without this package importing
torch.distributed: a callable that all-gathers one short text (or None) per rank, in rank order.
Every rank makes the same calls, whatever happens, so that no rank waits for one that failed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from .all_ranks import AllRanks, GatherTexts
from .cleanup import cleaning_up
from .commit import (
    commit,
    leave_in_order,
    new_id,
    read_record,
    recover_set,
    remove_temporaries,
    temporary_name,
    unfinished_sets,
    visible_files,
)
from .errors import CheckpointError
from .io import save_file
from .layout import SHARED, CheckpointSet, Role, count_rank_files, expert_shapes, split_key
from .state import METADATA, MODEL, NAMED_STATE, OPTIMIZER, SetMetadata, check_state

_MARK = ".one-folder-for-all-ranks-"  # of the file by which ranks find out whether they share one


def write_set(
    path: str,
    *,
    rank: int,
    world_size: int,
    shared_state: Mapping[str, Any] | None,
    rank_state: Mapping[str, Any] | None,
    num_rank_files: int,
    gather_texts: GatherTexts | None = None,
) -> str:
    """Save a set; every rank calls this. Afterwards it is the new set, or an error and the old one.

    Replaces whatever ``path`` names: a set of any number of ranks, or a merged file.

    Args:
        path: X.pt, the name of the set (X-shared.pt and X-rank-N.pt mean the same).
        rank, world_size: this process and the number of expert-parallel processes W.
        shared_state: content of X-shared.pt, from ``split_state``; used on rank 0 only.
        rank_state: content of X-rank-{rank}.pt; used where rank < num_rank_files.
        num_rank_files: S, ranks that hold all experts between them: a divisor of W.
        gather_texts: gathers texts of all ranks; needed if W > 1.

    Returns:
        The random save id stored in all files of the set.

    Raises:
        CheckpointError: on every rank, naming the ranks that failed and why.
        ValueError: rank and world_size that make no sense.
    """
    ranks = AllRanks(rank, world_size, gather_texts)
    cset = CheckpointSet.from_path(path)
    states: dict[Role, Mapping[str, Any] | None] = {}
    if rank == 0:
        states[SHARED] = shared_state
    if rank < num_rank_files:
        states[rank] = rank_state

    def prepare() -> str:
        for role, state in states.items():
            _check_kind(role, state, cset)
        if rank == 0:
            os.makedirs(cset.directory or ".", exist_ok=True)
            recover_set(cset)
        local = expert_shapes(rank_state[MODEL], f"rank {rank}")[0] if rank in states else 0
        return json.dumps([new_id(), os.path.basename(cset.path), num_rank_files, local])

    saves = [json.loads(text) for text in ranks.together(f"saving {cset.path}", prepare)]
    save_id = saves[0][0]
    num_experts = _check_same_save(saves, world_size)

    written = False  # this rank's files; from then on rank 0 may commit at any time

    def write() -> None:
        nonlocal written
        metadata = SetMetadata(save_id, world_size, num_rank_files, num_experts)
        _stage_states(cset, save_id, states, metadata)
        written = True

    def clean(ends_by_signal: bool) -> None:
        if rank == 0:
            leave_in_order(cset, save_id, ends_by_signal)
        elif not written:
            for role in states:
                _remove_file(_temporary_path(cset, save_id, role))

    names = {cset.name_of(role) for role in (SHARED, *range(num_rank_files))}

    def publish() -> None:
        _on_first(rank, commit, cset, save_id, names, names)

    with cleaning_up(clean):
        try:
            ranks.together(f"saving {cset.path}", write)
        except CheckpointError:  # raised on all ranks: none will commit
            remove_temporaries(cset, save_id)
            raise
        ranks.together(f"saving {cset.path}", publish)
    return save_id


def copy_set(
    src: str,
    dst: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather_texts: GatherTexts | None = None,
) -> None:
    """Give a set a second name, replacing what has that name; the data is shared where possible.

    Rank 0 makes hard links, or copies where the file system has none; the others wait for it.

    Raises:
        CheckpointError: no such set, the same name twice, or the file system failed.
    """
    ranks = AllRanks(rank, world_size, gather_texts)
    source, target = CheckpointSet.from_path(src), CheckpointSet.from_path(dst)
    ranks.together(f"copying {src} to {dst}", lambda: _on_first(rank, _copy, source, target))


def remove_set(
    path: str, *, rank: int = 0, world_size: int = 1, gather_texts: GatherTexts | None = None
) -> None:
    """Remove all files that ``path`` names, as one thing; nothing there is no error."""
    ranks = AllRanks(rank, world_size, gather_texts)
    cset = CheckpointSet.from_path(path)
    ranks.together(f"removing {path}", lambda: _on_first(rank, _remove, cset))


def recover(
    path: str, *, rank: int = 0, world_size: int = 1, gather_texts: GatherTexts | None = None
) -> None:
    """Finish or clean up an interrupted save to ``path``, before the run that owns it starts.

    Never needed to load: readers see the right set in any state. ``write_set`` does it by itself.
    """
    ranks = AllRanks(rank, world_size, gather_texts)
    cset = CheckpointSet.from_path(path)
    ranks.together(f"recovering {path}", lambda: _on_first(rank, recover_set, cset))


def recover_directory(
    directory: str, *, rank: int = 0, world_size: int = 1, gather_texts: GatherTexts | None = None
) -> None:
    """``recover`` for every set of a directory: what a run does with its save dir when it starts.

    Also removes what :func:`check_shared_directory` of a killed process left there.
    """

    def recover_all() -> None:
        for cset in unfinished_sets(directory):
            recover_set(cset)
        for name in os.listdir(directory) if os.path.isdir(directory) else ():
            if name.startswith(_MARK):
                _remove_file(os.path.join(directory, name))

    ranks = AllRanks(rank, world_size, gather_texts)
    ranks.together(f"recovering {directory}", lambda: _on_first(rank, recover_all))


def check_shared_directory(
    directory: str, *, rank: int = 0, world_size: int = 1, gather_texts: GatherTexts | None = None
) -> None:
    """Find out before a run, not at its first save, whether all ranks write to one folder.

    Raises:
        CheckpointError: on every rank; names the ranks that see another folder, and both paths.
    """
    ranks = AllRanks(rank, world_size, gather_texts)
    here = os.path.abspath(directory)
    marks: list[str] = []  # of rank 0

    def leave_a_mark() -> str | None:
        if rank != 0:
            return None
        os.makedirs(here, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=_MARK, dir=here)
        os.close(handle)
        marks.append(path)
        return path

    def look() -> None:
        if not os.path.exists(os.path.join(here, os.path.basename(path))):
            raise CheckpointError(
                f"{here} on {socket.gethostname()} is not the save dir of rank 0, "
                f"{os.path.dirname(path)}; all ranks must write to one folder of a shared file "
                "system"
            )

    def remove_mark(ends_by_signal: bool) -> None:
        for mark in marks:
            _remove_file(mark)

    with cleaning_up(remove_mark):
        path = ranks.together("writing to the save dir", leave_a_mark)[0]
        ranks.together("checking the save dir", look)
        remove_mark(False)


def set_exists(path: str) -> bool:
    """Whether ``path`` names a set or a merged file (complete or not)."""
    return bool(visible_files(CheckpointSet.from_path(path)))


def find_sets(directory: str, pattern: str, keep_match: bool = False) -> list[Any]:
    """Canonical paths of the sets whose name matches, as fairseq's ``checkpoint_paths``.

    Args:
        pattern: regular expression for all of X.pt; its first group, if any, is a number.
        keep_match: return pairs (path, number) instead.

    Returns:
        Paths sorted by that number (else by name), descending. Incomplete sets are among them.
    """
    regex = re.compile(pattern)
    entries = []
    for cset in _sets_in(directory):
        match = regex.fullmatch(os.path.basename(cset.path))
        if match is not None and visible_files(cset):
            entries.append((float(match[1]) if regex.groups else 0.0, cset.path))
    entries.sort(reverse=True)
    return [(path, number) if keep_match else path for number, path in entries]


def stage_file(cset: CheckpointSet, operation: str, role: Role, state: Mapping[str, Any]) -> None:
    """Write a member under its temporary name; ``commit`` makes it real."""
    save_file(state, _temporary_path(cset, operation, role))


def _stage_states(
    cset: CheckpointSet,
    save_id: str,
    states: Mapping[Role, Mapping[str, Any]],
    metadata: SetMetadata,
) -> None:
    for role, state in states.items():
        stored = metadata.to_dict() | {"rank": None if role == SHARED else role}
        stage_file(cset, save_id, role, {**state, METADATA: stored})


def _check_kind(role: Role, state: Mapping[str, Any] | None, cset: CheckpointSet) -> None:
    """A shared state has no experts, a rank state nothing else."""
    check_state(state, cset.name_of(role))
    named_state = (state.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    misplaced = [
        key for key in (*state[MODEL], *named_state) if (split_key(key) is None) != (role == SHARED)
    ]
    if misplaced:
        raise CheckpointError(
            f"{cset.name_of(role)} must hold only "
            f"{'dense' if role == SHARED else 'expert'} parameters, got {misplaced[0]!r}"
        )


def _check_same_save(saves: list[list[Any]], world_size: int) -> int:
    """Ranks must take part in the same save. All compare the same values. Returns E."""
    for other, save in enumerate(saves):
        if save[1:3] != saves[0][1:3]:
            raise CheckpointError(
                f"ranks disagree on (name, number of rank files): rank 0 has {saves[0][1:3]}, "
                f"rank {other} has {save[1:3]}"
            )
    num_rank_files = saves[0][2]
    local = [save[3] for save in saves[:num_rank_files]]
    if not 1 <= num_rank_files <= world_size or len(set(local)) != 1 or local[0] < 1:
        raise CheckpointError(
            f"every rank that writes must have the same number of experts, at least 1; "
            f"got {local} in {num_rank_files} rank files of {world_size} ranks"
        )
    num_experts = local[0] * num_rank_files
    count_rank_files(num_experts, world_size, num_rank_files)  # raises if that cannot be
    return num_experts


def _on_first(rank: int, action: Any, *args: Any) -> None:
    if rank == 0:
        action(*args)


def _copy(source: CheckpointSet, target: CheckpointSet) -> None:
    if source.same_place(target):
        raise CheckpointError(f"cannot copy {source.path} onto itself")
    recover_set(source)
    recover_set(target)
    files = visible_files(source)
    if not files:
        raise CheckpointError(f"{source.path}: no such checkpoint")
    os.makedirs(target.directory or ".", exist_ok=True)
    operation = new_id()
    names = {target.name_of(role) for role in files}
    with cleaning_up(functools.partial(leave_in_order, target, operation)):
        for role, path in files.items():
            _link_or_copy(path, _temporary_path(target, operation, role))
        commit(target, operation, names, names)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # no hard links here, or across file systems
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def _remove(cset: CheckpointSet) -> None:
    recover_set(cset)
    if visible_files(cset):
        operation = new_id()
        with cleaning_up(functools.partial(leave_in_order, cset, operation)):
            commit(cset, operation, set(), set())


def _remove_file(path: str) -> None:
    with contextlib.suppress(OSError):  # the next start tries again
        os.unlink(path)


def _temporary_path(cset: CheckpointSet, operation: str, role: Role) -> str:
    return os.path.join(cset.directory, temporary_name(cset.name_of(role), operation))


def _sets_in(directory: str) -> set[CheckpointSet]:
    names = [name for name in os.listdir(directory) if name.endswith(".pt")]
    sets = {CheckpointSet.from_path(os.path.join(directory, name)) for name in names}
    # a first save that was interrupted after its record has no file under its final name yet
    return sets | {cset for cset in unfinished_sets(directory) if read_record(cset) is not None}
