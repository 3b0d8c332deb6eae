"""What a name stands for: a set, a merged file or nothing; every reader asks here."""

from __future__ import annotations

import os

from .commit import visible_files
from .errors import CheckpointError
from .layout import MERGED, SHARED, CheckpointSet, Role


def locate(path: str) -> tuple[CheckpointSet, dict[Role, str], str]:
    """The set that ``path`` belongs to, its files as a reader must see them, "set" or "merged".

    Raises:
        CheckpointError: nothing of that name, a set without its shared file, or both a set and a
            merged file and ``path`` names both.
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
    """What ``path`` names, for a program that reads single files; None if there is nothing.

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
