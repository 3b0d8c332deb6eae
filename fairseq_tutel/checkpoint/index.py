"""The index ``X.pt`` of a set: a small file that names the other files, and is the commit.

A save writes its files under names that no other save has, ``X.pt.ID-shared.pt`` and
``X.pt.ID-rank-N.pt``: a set in Meta's layout with the stem ``X.pt.ID``. When they are on the disk,
one process replaces ``X.pt`` in one step. A crash before that leaves the old set, a crash after it
the new one. Files that no index names are removed by the next save of ``X.pt``.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from .io import Checksums, load_file, save_file, sync_directory
from .layout import MERGED, SHARED, CheckpointError, CheckpointSet, Role

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


def read_index(cset: CheckpointSet) -> CheckpointSet | None:
    """Return the location of the files that X.pt names; None if it is missing or no index.

    The files may have been renamed with the index. A copy of the index alone, or a link to it,
    names the files of the original. CheckpointError if the index is damaged.
    """
    if not os.path.exists(cset.path) or os.path.getsize(cset.path) > _LARGEST:
        return None
    Checksums(cset.path)  # of the names
    names = load_file(cset.path).get(_MEMBERS)
    if names is None:
        return None
    first = names[0] if isinstance(names, list) and names else None
    member = _MEMBER.fullmatch(first) if isinstance(first, str) else None
    if member is None or os.path.basename(member[0]) != member[0]:
        raise CheckpointError(f"{cset.path}: is a damaged index of {names!r}")
    renamed = CheckpointSet(cset.directory, cset.name_of(MERGED) + member["id"])
    target = os.path.realpath(cset.path) if os.path.islink(cset.path) else cset.path
    named = CheckpointSet(os.path.dirname(target), member["index"] + member["id"])
    return renamed if os.path.exists(renamed.path_of(SHARED)) else named


def visible_files(cset: CheckpointSet) -> dict[Role, str]:
    """Return the paths of X.pt, X-shared.pt and X-rank-N.pt that are there."""
    if os.path.exists(f"{cset.path}.commit") and read_index(cset) is None:
        raise CheckpointError(
            f"{cset.path}.commit: an earlier version was interrupted at the end of a save; rename "
            "the files as its 'renames' say, then remove it"
        )
    return cset.files()


def begin(cset: CheckpointSet) -> str:
    """Make the folder, remove what interrupted saves of X.pt left; return the id of a new save."""
    os.makedirs(cset.directory or ".", exist_ok=True)
    remove_unnamed(cset)
    return secrets.token_hex(8)


@contextlib.contextmanager
def cleaning_up(cset: CheckpointSet) -> Iterator[None]:
    """Remove the files of a save that fails in the block."""
    try:
        yield
    except BaseException:
        remove_unnamed(cset)
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
    os.replace(new.path, cset.path)
    try:
        sync_directory(cset.directory)
    except OSError as error:
        text = f"{cset.path}: saved, but the folder could not be forced to the disk: {error}"
        raise CheckpointError(text) from error
    remove_unnamed(cset, earlier=True)


def remove(cset: CheckpointSet) -> None:
    """Remove X.pt and its files, but those that another index names; X.pt is the last.

    Therefore an interrupted removal is seen, and can be repeated.
    """
    _remove_files(cset, earlier=True, named_elsewhere=True)
    Path(cset.path).unlink(missing_ok=True)


def remove_unnamed(cset: CheckpointSet, *, earlier: bool = False) -> None:
    """Remove files of saves of X.pt that no index in the folder names; the next save retries.

    ``earlier``: also the set that an earlier version wrote under the name.
    """
    with contextlib.suppress(OSError, CheckpointError):
        read_index(cset)  # if it is damaged, nobody knows which files it names
        _remove_files(cset, earlier=earlier)


def _remove_files(cset: CheckpointSet, *, earlier: bool, named_elsewhere: bool = False) -> None:
    index, names = cset.name_of(MERGED), [path.name for path in Path(cset.directory).glob("*")]
    mine = [match for match in map(_MEMBER.fullmatch, names) if match and match["index"] == index]
    others = [name for name in names if not is_member(name)] if mine else []
    texts = [_text(cset, name) for name in others if not (named_elsewhere and name == index)]
    gone = [
        match[0]
        for match in mine
        if not any(f"{match['id']}-shared.pt".encode() in text for text in texts)
    ]
    if earlier:
        endings = {name: name.removeprefix(cset.stem) for name in names}
        gone += [name for name, end in endings.items() if end != name and _EARLIER.fullmatch(end)]
    for name in gone:
        Path(cset.directory, name).unlink(missing_ok=True)


def _text(cset: CheckpointSet, name: str) -> bytes:
    """Return the bytes of a file that may be an index; torch stores texts as they are."""
    path = Path(cset.directory, name)
    with contextlib.suppress(OSError):
        if name.endswith(".pt") and path.stat().st_size <= _LARGEST:
            return path.read_bytes()
    return b""
