"""Rewriting a checkpoint for another number of ranks, or as one file.

Tensors are moved, never computed with: the optimizer state of an expert is stored by the expert's
own name, complete with its scalars, so nothing needs rescaling and every bit survives. Files are
read memory-mapped and written one at a time, so memory stays near the size of one output file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from .cleanup import cleaning_up
from .commit import commit, leave_in_order, new_id, recover_set, visible_files
from .errors import CheckpointError
from .layout import (
    MERGED,
    SHARED,
    CheckpointSet,
    Role,
    count_rank_files,
    experts_of_rank,
)
from .load import SetReader
from .state import METADATA, SetMetadata, split_state
from .store import stage_file

Progress = Callable[[int, int, str], None]  # (files done, files in all, name of the file)


def reshard(
    src: str,
    dst: str,
    num_ranks: int,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> str:
    """Write a copy of a checkpoint as a set for ``num_ranks`` ranks, optimizer state included.

    Args:
        src: a set or a merged file; it is only read.
        dst: name of the new set, X.pt.
        num_ranks: W; with fewer experts than ranks the set has one file per expert.
        force: replace what ``dst`` names.
        progress: called before each file is written, and once at the end.

    Returns:
        The canonical path of the new set.

    Raises:
        CheckpointError: ``src`` cannot be read, E and W do not divide, ``dst`` exists, or is
            ``src``.
    """
    target = _check_target(src, dst, force)
    reader = SetReader(src)
    if not reader.num_experts:
        raise CheckpointError(f"{src}: has no experts, so there is nothing to place on ranks")
    num_files = count_rank_files(reader.num_experts, num_ranks)
    metadata = SetMetadata(new_id(), _saved_by(reader), num_files, reader.num_experts)

    def members() -> Iterator[tuple[Role, dict[str, Any]]]:
        keep = reader.has_optimizer
        yield SHARED, split_state(reader.state_of(range(0), with_optimizer=keep))[0]
        for rank in range(num_files):
            wanted = experts_of_rank(rank, num_ranks, reader.num_experts)
            yield rank, split_state(reader.state_of(wanted, with_optimizer=keep))[1]

    _write(target, metadata, members(), num_files + 1, progress)
    return target.path


def merge(
    src: str,
    dst: str,
    *,
    with_optimizer: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> str:
    """Write a copy of a checkpoint as one file, experts numbered globally; for sharing.

    Args:
        src: a set or a merged file; it is only read.
        dst: the new file, X.pt.
        with_optimizer: keep the optimizer state, about twice the size of the fp32 weights.
        force: replace what ``dst`` names.
        progress: called before the file is written, and once at the end.

    Returns:
        The path of the new file.

    Raises:
        CheckpointError: ``src`` cannot be read, has no optimizer state that was asked for, ``dst``
            exists, or is ``src``.
    """
    target = _check_target(src, dst, force)
    reader = SetReader(src)
    if with_optimizer and not reader.has_optimizer:
        raise CheckpointError(f"{src}: has no optimizer state that could be merged")
    metadata = SetMetadata(new_id(), _saved_by(reader), 0, reader.num_experts)

    def members() -> Iterator[tuple[Role, dict[str, Any]]]:
        yield MERGED, reader.state_of(range(reader.num_experts), with_optimizer=with_optimizer)

    _write(target, metadata, members(), 1, progress)
    return target.path


def _saved_by(reader: SetReader) -> int:
    """Ranks of the run, whose steps the position in the data is counted in; not of the new set."""
    return reader.metadata.world_size if reader.metadata else reader.num_rank_files


def _check_target(src: str, dst: str, force: bool) -> CheckpointSet:
    target = CheckpointSet.from_path(dst)
    if CheckpointSet.from_path(src).same_place(target):
        raise CheckpointError(f"{dst}: is the source itself, which is never modified")
    existing = sorted(visible_files(target).values())
    if existing and not force:
        raise CheckpointError(f"{dst}: exists ({existing[0]}); use --force to replace it")
    return target


def _write(
    target: CheckpointSet,
    metadata: SetMetadata,
    members: Iterator[tuple[Role, dict[str, Any]]],
    num_files: int,
    progress: Progress | None,
) -> None:
    """Write the members one after the other, then make them appear together."""
    os.makedirs(target.directory or ".", exist_ok=True)
    recover_set(target)
    names: set[str] = set()
    operation = metadata.save_id
    with cleaning_up(functools.partial(leave_in_order, target, operation)):
        for role, state in members:
            names.add(target.name_of(role))
            if progress is not None:
                progress(len(names) - 1, num_files, target.name_of(role))
            rank = role if isinstance(role, int) else None
            stored = metadata.to_dict() | {"rank": rank}
            stage_file(target, operation, role, {**state, METADATA: stored})
        commit(target, operation, names, names)
    if progress is not None:
        progress(num_files, num_files, target.path)
