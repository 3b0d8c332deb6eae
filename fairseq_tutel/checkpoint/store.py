"""Save, rewrite, copy, remove and list checkpoint sets, each set as one thing.

Several ranks pass :class:`.all_ranks.AllRanks`, and every rank makes the same calls.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import index
from .all_ranks import AllRanks
from .io import save_file
from .layout import (
    MERGED,
    SHARED,
    CheckpointError,
    CheckpointSet,
    Role,
    count_rank_files,
    expert_forms,
    experts_of_rank,
)
from .reader import SetReader, locate, read_set
from .state import METADATA, MODEL, SetMetadata, join_state, split_state

State = Mapping[str, Any]
# global numbers of experts -> their (tensors, optimizer state), by name, numbered from 0
Experts = Callable[[range], tuple[Mapping[str, Any], Mapping[str, Any]]]

logger = logging.getLogger(__name__)

_ALONE = AllRanks()
_MARK = ".one-folder-for-all-ranks."


def save_set(path: str, state: State, *, num_rank_files: int, ranks: AllRanks = _ALONE) -> None:
    """Save a set in one step; every rank calls this.

    The new set replaces what ``path`` names. After an error, raised as CheckpointError on every
    rank, the old files are still there, unless the message says that the new set is saved.

    Args:
        path: X.pt, the name of the set (X-shared.pt and X-rank-N.pt mean the same).
        state: state of this rank (``state.py``), experts numbered from 0. The set gets the dense
            part of rank 0, and the experts of the ranks below ``num_rank_files``.
        num_rank_files: P, ranks that hold all experts between them: a divisor of W.
        ranks: this rank, and the collective that reports errors to the other ranks.
    """
    rank, what = ranks.rank, f"saving {path}"
    cset = CheckpointSet.from_path(path)
    states: dict[Role, State] = {}

    def prepare() -> str:
        shared, mine = split_state(state)
        if rank < num_rank_files:
            states[rank] = mine
        if rank == 0:
            states[SHARED] = shared
        local = expert_forms(mine[MODEL], f"rank {rank}")[0]
        if rank == 0:
            os.makedirs(cset.directory or ".", exist_ok=True)
        return json.dumps([own_id, os.path.basename(cset.path), num_rank_files, local])

    def write() -> None:
        for role, content in states.items():
            _write(cset, role, content, metadata)

    own_id = index.new_id()  # rank 0's counts
    with index.cleaning_up(cset, own_id) if rank == 0 else contextlib.nullcontext():
        saves = [json.loads(text) for text in ranks.run_on_all_ranks(what, prepare)]
        save_id, num_experts = saves[0][0], _agreed_num_experts(saves)
        metadata = SetMetadata(save_id, ranks.world_size, num_rank_files, num_experts)
        ranks.run_on_all_ranks(what, write)
        roles = [SHARED, *range(num_rank_files)]
        ranks.run_on_first(what, lambda: index.commit(cset, save_id, roles))


def write_set(
    path: str,
    shared: State,
    experts: Experts,
    *,
    num_experts: int,
    num_ranks: int | None,
    source: SetReader | None = None,
    force: bool = False,
    in_place: bool = False,
) -> str:
    """Write a checkpoint of any origin from one process, one file at a time.

    Memory stays near the size of one file if ``experts`` reads from mapped files, as a
    :class:`SetReader` does. An error leaves nothing behind.

    Args:
        path: X.pt; the canonical path is returned.
        shared: everything but the experts, as :meth:`SetReader.shared_state` returns it.
        experts: is called once for each file, with the experts that the file holds, in order.
        num_experts: E.
        num_ranks: W; the set gets min(E, W) rank files. None: write a merged file.
        source: the set that the new one is made from, whose world size it keeps.
        force: replace what ``path`` names.
        in_place: replace what ``path`` names in one step, even if it is ``source``.

    Raises:
        CheckpointError: E and W do not divide, or ``path`` exists or names ``source``.
    """
    target = CheckpointSet.from_path(path)
    if not in_place:
        refuse_target(path, source and source.cset.path, force)
    files: dict[Role, range] = {MERGED: range(num_experts)}
    if num_ranks is not None:
        count = count_rank_files(num_experts, num_ranks)
        of_ranks = {rank: experts_of_rank(rank, num_ranks, num_experts) for rank in range(count)}
        files = {SHARED: range(0), **of_ranks}
    world_size = source.world_size if source else num_ranks or 1
    os.makedirs(target.directory or ".", exist_ok=True)
    save_id = index.new_id()
    metadata = SetMetadata(save_id, world_size, len(files) - 1, num_experts)
    with index.cleaning_up(target, save_id):
        for number, (role, numbers) in enumerate(files.items(), start=1):
            logger.info("[%d/%d] writing %s", number, len(files), target.name_of(role))
            state = join_state(shared, *experts(numbers))
            if role != MERGED:
                state = split_state(state)[0 if role == SHARED else 1]
            _write(target, role, state, metadata)
            del state  # before the next one is read
        index.commit(target, save_id, files)
    return target.path


def refuse_target(path: str, source: str | None, force: bool) -> None:
    """Raise CheckpointError if :func:`write_set` would not write there."""
    names = [index.of_member(CheckpointSet.from_path(each).path) for each in (path, source) if each]
    if source and len({os.path.realpath(name) for name in names}) == 1:
        raise CheckpointError(f"{path}: is the source itself, which is never modified")
    if set_exists(path) and not force:
        raise CheckpointError(f"{path}: exists; use --force to replace it")


def reshard(src: str, dst: str, num_ranks: int, *, force: bool = False) -> str:
    """Write a copy of a set or merged file for other ranks, optimizer state included.

    The canonical path of ``dst`` is returned. Arguments and errors are those of :func:`write_set`.
    """
    source = read_set(src)
    if not source.num_experts:
        raise CheckpointError(f"{src}: has no experts, so there is nothing to place on ranks")
    return _rewrite(source, dst, num_ranks, with_optimizer=True, force=force)


def merge(src: str, dst: str, *, with_optimizer: bool = False, force: bool = False) -> str:
    """Write a copy as one file, experts numbered globally; see :func:`reshard`."""
    source = read_set(src)
    if with_optimizer and not source.has_optimizer:
        raise CheckpointError(f"{src}: has no optimizer state that could be merged")
    return _rewrite(source, dst, None, with_optimizer=with_optimizer, force=force)


def _rewrite(
    source: SetReader, dst: str, num_ranks: int | None, *, with_optimizer: bool, force: bool
) -> str:
    shared = source.shared_state(with_optimizer=with_optimizer)
    experts = functools.partial(source.experts, with_optimizer=with_optimizer)
    how = {"num_experts": source.num_experts, "num_ranks": num_ranks, "force": force}
    return write_set(dst, shared, experts, source=source, **how)


def copy_set(src: str, dst: str, *, ranks: AllRanks = _ALONE) -> None:
    """Copy a set in place of what ``dst`` names, by hard links if the file system has them."""
    target = CheckpointSet.from_path(dst)

    def copy() -> None:
        _, files, _ = locate(src)
        os.makedirs(target.directory or ".", exist_ok=True)
        save_id = index.new_id()
        with index.cleaning_up(target, save_id):
            for role, path in files.items():
                _link_or_copy(path, index.members_of(target, save_id).path_of(role))
            index.commit(target, save_id, files)

    ranks.run_on_first(f"copying {src} to {dst}", copy)


def remove_set(path: str, *, ranks: AllRanks = _ALONE) -> None:
    """Remove all files that ``path`` names, and that no other index names; none are no error."""
    cset = CheckpointSet.from_path(path)
    ranks.run_on_first(f"removing {path}", lambda: index.remove(cset))


def check_shared_directory(directory: str, *, ranks: AllRanks = _ALONE) -> None:
    """Check before a run that all ranks write to one folder; CheckpointError names both paths."""
    folder = Path(os.path.abspath(directory))

    def leave_a_mark() -> str | None:
        if ranks.rank != 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=_MARK, dir=folder)
        os.close(handle)
        return path

    def look() -> None:
        if not (folder / os.path.basename(path)).exists():
            raise CheckpointError(
                f"{folder} on {socket.gethostname()} is not the save dir of rank 0, "
                f"{os.path.dirname(path)}; all ranks must write to one shared folder"
            )

    try:
        path = ranks.run_on_all_ranks("writing to the save dir", leave_a_mark)[0]
        ranks.run_on_all_ranks("checking the save dir", look)
    finally:
        for mark in folder.glob(f"{_MARK}*") if ranks.rank == 0 else ():
            mark.unlink(missing_ok=True)


def set_exists(path: str) -> bool:
    """Return whether ``path`` names a set or a merged file (complete or not)."""
    return bool(index.visible_files(CheckpointSet.from_path(path)))


def find_sets(directory: str, pattern: str) -> dict[str, float]:
    """Find the sets whose X.pt matches a regular expression, as fairseq's ``checkpoint_paths``.

    Return canonical path -> number in the pattern's first group, or 0, in descending order.
    Incomplete sets are among them.
    """
    regex = re.compile(pattern)
    names = [name for name in os.listdir(directory) if name.endswith(".pt")]
    paths = {os.path.join(directory, name) for name in names if not index.is_member(name)}
    entries = []
    for path in {CheckpointSet.from_path(path).path for path in paths}:
        match = regex.fullmatch(os.path.basename(path))
        if match is not None:
            entries.append((float(match[1]) if regex.groups else 0.0, path))
    return {path: number for number, path in sorted(entries, reverse=True)}


def _write(cset: CheckpointSet, role: Role, state: State, metadata: SetMetadata) -> None:
    """Write a file of a save, which :func:`.index.commit` makes one of the set."""
    stored = replace(metadata, rank=role if isinstance(role, int) else None)
    path = index.members_of(cset, metadata.save_id).path_of(role)
    save_file({**state, METADATA: asdict(stored)}, path)


def _agreed_num_experts(saves: list[list[Any]]) -> int:
    """Return E; raise CheckpointError if the ranks do not take part in the same save."""
    for other, save in enumerate(saves):
        if save[1:] != saves[0][1:]:
            raise CheckpointError(
                "ranks disagree on (name, number of rank files, experts of a rank): rank 0 has "
                f"{saves[0][1:]}, rank {other} has {save[1:]}"
            )
    (_, _, num_rank_files, local), world_size = saves[0], len(saves)
    if not 1 <= num_rank_files <= world_size or local < 1:
        files = f"{num_rank_files} rank files of {local} experts"
        raise CheckpointError(f"{files} cannot be written by {world_size} ranks")
    # raises if these experts cannot be placed
    return local * count_rank_files(local * num_rank_files, world_size, num_rank_files)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)  # a link's file, not the link
    except FileNotFoundError:
        raise
    except OSError:  # no hard links here, or across file systems
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
