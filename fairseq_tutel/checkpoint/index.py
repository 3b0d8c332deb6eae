"""The index ``X.pt`` of a set: a small file that names the other files, and is the commit.

A save writes its files under names that no other save has, ``X.pt.ID-shared.pt`` and
``X.pt.ID-rank-N.pt``: a set in Meta's layout with the stem ``X.pt.ID``. When they are on the disk,
one process replaces ``X.pt`` in one step. A crash before that leaves the old set, a crash after it
the new one. Files that no index names are removed after the next save of ``X.pt``, unless there was
no ``X.pt`` before it: they may then be a set whose index was lost.
"""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .io import Checksums, identity, load_file, save_file, sync_directory
from .layout import MERGED, SHARED, CheckpointError, CheckpointSet, Role

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MEMBERS, _LARGEST = "moe_members", 1 << 20  # a file of more bytes is no index
_ABOUT = (
    "This is the index of a checkpoint in several files, which moe_members names. To make one "
    "file of them: python -m fairseq_tutel.checkpoint merge NAME.pt OUT.pt"
)
_MEMBER = re.compile(r"(?P<index>.+\.pt)(?P<id>\.[0-9a-f]{16})(-shared|-rank-\d+)?\.pt")
# endings of files that earlier versions have beside X.pt: members, temporary files, commit records
_EARLIER = re.compile(
    r"(-shared|-rank-\d+)\.pt|(-shared|-rank-\d+)?\.pt(\.commit)?\.[0-9a-f]{16}\.tmp|\.pt\.commit"
)


def members_of(cset: CheckpointSet, save_id: str) -> CheckpointSet:
    """Return the location of the files that the save with that id writes."""
    return CheckpointSet(cset.directory, f"{cset.name_of(MERGED)}.{save_id}")


def is_member(name: str) -> bool:
    """Return whether a file name is of the kind that an index names."""
    return _MEMBER.fullmatch(name) is not None


def of_member(path: str) -> str:
    """Return the path of the index that belongs to a member or its set; else the path itself."""
    folder, name = os.path.split(path)
    member = _MEMBER.fullmatch(name)
    return os.path.join(folder, member["index"]) if member else path


def read_index(cset: CheckpointSet) -> CheckpointSet | None:
    """Return the location of the files that X.pt names; None if it is missing or no index.

    The files may have been renamed with the index. A copy of the index alone in their folder, or a
    link to it, names the same files. CheckpointError if the index is damaged.
    """
    try:
        if os.stat(cset.path).st_size > _LARGEST:
            return None
    except FileNotFoundError:  # any other error does not say that it is missing
        return None
    names = unless_replaced(cset.path, lambda: _names_in(cset.path))
    if names is None:
        return None
    first = names[0] if isinstance(names, list) and names else None
    member = _MEMBER.fullmatch(first) if isinstance(first, str) else None
    if member is None or os.path.basename(member[0]) != member[0]:
        raise CheckpointError(f"{cset.path}: is a damaged index of {names!r}")
    folder = os.path.dirname(
        os.path.realpath(cset.path) if os.path.islink(cset.path) else cset.path
    )
    named = CheckpointSet(folder, member["index"] + member["id"])
    renamed = CheckpointSet(cset.directory, cset.name_of(MERGED) + member["id"])
    # no other save has the id, so its files may have any name
    others = map(CheckpointSet.from_path, Path(folder).glob(f"*{member['id']}-shared.pt"))
    found = (each for each in (renamed, named, *others) if os.path.exists(each.path_of(SHARED)))
    return next(found, named)


def _names_in(path: str) -> Any:
    Checksums(path)  # of the names
    return load_file(path).get(_MEMBERS)


def unless_replaced(path: str, read: Callable[[], T]) -> T:
    """Read; read again if another job replaced the checkpoint X.pt at ``path`` meanwhile."""
    while True:
        before = _fingerprint(path)
        try:
            return read()
        except CheckpointError:
            if _fingerprint(path) == before:
                raise
            logger.info("%s was replaced while it was read; reading it again", path)


def _fingerprint(path: str) -> object:
    """Return a value that differs after each commit of the checkpoint X.pt at ``path``.

    It is the index's bytes, whose names no other save has: a file system may give a new file the
    number and time of the one that it replaces.
    """
    try:
        if os.path.getsize(path) <= _LARGEST:
            return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return identity(path)


def visible_files(cset: CheckpointSet) -> dict[Role, str]:
    """Return the paths of X.pt, X-shared.pt and X-rank-N.pt that are there."""
    if os.path.exists(f"{cset.path}.commit") and read_index(cset) is None:
        raise CheckpointError(
            f"{cset.path}.commit: an earlier version was interrupted at the end of a save; rename "
            "the files as its 'renames' say, then remove it"
        )
    return cset.files()


def new_id() -> str:
    """Return the id of a new save."""
    return secrets.token_hex(8)


@contextlib.contextmanager
def cleaning_up(cset: CheckpointSet, save_id: str) -> Iterator[None]:
    """Remove the files of this save if it fails in the block, unless X.pt names them."""
    try:
        yield
    except BaseException:
        new = members_of(cset, save_id)
        with contextlib.suppress(OSError, CheckpointError):
            named = read_index(cset)
            if named is None or named.path != new.path:
                for path in new.files().values():
                    Path(path).unlink(missing_ok=True)
        raise


def commit(cset: CheckpointSet, save_id: str, roles: Collection[Role]) -> None:
    """Make X.pt name these files of the save; a merged file becomes X.pt itself.

    After an error the old set is untouched, unless the message says that the new one is saved.
    """
    new = members_of(cset, save_id)
    written = new.files()
    for role in roles:
        if role not in written:
            raise CheckpointError(
                f"{new.path_of(role)}: was written, but rank 0 does not see it; all ranks must "
                "save into one shared file system, and no other job under this name"
            )
    if MERGED not in roles:
        save_file({"about": _ABOUT, _MEMBERS: [new.name_of(role) for role in roles]}, new.path)
    sync_directory(cset.directory)
    existed = os.path.exists(cset.path)
    os.replace(new.path, cset.path)
    try:
        sync_directory(cset.directory)
    except OSError as error:
        text = f"{cset.path}: saved, but the folder could not be forced to the disk: {error}"
        raise CheckpointError(text) from error
    # another job under this name may have taken them for litter: then the old set must stay
    if MERGED not in roles and not set(roles) <= set(new.files()):
        raise CheckpointError(f"{cset.path}: another job under this name removed the files of it")
    with contextlib.suppress(OSError, CheckpointError):
        _remove_files(cset, unnamed=existed)


def remove(cset: CheckpointSet) -> None:
    """Remove X.pt and its files, but those that another index names; X.pt is the last.

    Therefore an interrupted removal is seen, and can be repeated.
    """
    _remove_files(cset, named_elsewhere=True)
    Path(cset.path).unlink(missing_ok=True)


def _remove_files(cset: CheckpointSet, *, unnamed=True, named_elsewhere: bool = False) -> None:
    """Remove the set that an earlier version wrote under the name, and files of saves of X.pt.

    ``unnamed``: those that no index in the folder names. ``named_elsewhere``: also those that X.pt
    names. OSError if a file cannot be read that may be an index.
    """
    index, names = cset.name_of(MERGED), [path.name for path in Path(cset.directory).glob("*")]
    mine = [match for match in map(_MEMBER.fullmatch, names) if match and match["index"] == index]
    others = [name for name in names if not is_member(name)] if mine and unnamed else []
    texts = [_text(cset, name) for name in others if not (named_elsewhere and name == index)]
    gone = [
        match[0]
        for match in mine
        if unnamed and not any(f"{match['id']}-shared.pt".encode() in text for text in texts)
    ]
    if _has_earlier_set(cset):
        endings = {name: name.removeprefix(cset.stem) for name in names}
        found = [name for name, end in endings.items() if end != name and _EARLIER.fullmatch(end)]
        gone += sorted(found, key=lambda name: name == cset.name_of(SHARED))  # it tells: the last
    for name in gone:
        Path(cset.directory, name).unlink(missing_ok=True)


def _has_earlier_set(cset: CheckpointSet) -> bool:
    """Return whether X-shared.pt is part of a checkpoint, and not a file of somebody else's."""
    path = cset.path_of(SHARED)
    return os.path.exists(path) and isinstance(load_file(path).get("model"), dict)


def _text(cset: CheckpointSet, name: str) -> bytes:
    """Return the bytes of a file that may be an index; torch stores texts as they are."""
    path = Path(cset.directory, name)
    with contextlib.suppress(FileNotFoundError):
        if path.is_file() and path.stat().st_size <= _LARGEST:
            return path.read_bytes()
    return b""
