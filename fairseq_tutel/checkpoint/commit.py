"""Changing several files as one: new files under temporary names, then a redo log, then renames.

    1. write ``NAME.ID.tmp`` beside every NAME and force it to the disk
    2. write the commit record ``X.pt.commit``, one JSON file that appears by an atomic rename
    3. rename every temporary file into place, remove what the new set does not have
    4. remove the commit record

A crash before 2 leaves the old set and stale temporary files; a crash after it leaves a complete
new set, part of it under temporary names that the record lists. Readers follow the record
(``visible_files``) and change nothing; the next writer finishes the work (``recover_set``). This is
redo logging as in databases: Mohan et al., ARIES, ACM TODS 17(1), 1992, reduced to one record.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from dataclasses import dataclass

from .errors import CheckpointError
from .io import sync_directory
from .layout import CheckpointSet, Role

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"(?P<final>.+\.pt(?:\.commit)?)\.[0-9a-f]{16}\.tmp")
_COMMIT_SUFFIX = ".commit"


@dataclass(frozen=True)
class CommitRecord:
    """What turns the old set into the new one; file names without their directory."""

    renames: dict[str, str]  # temporary name -> final name
    removals: tuple[str, ...] = ()


def new_id() -> str:
    """16 random hexadecimal digits: of a save, and in the names of its temporary files."""
    return secrets.token_hex(8)


def temporary_name(name: str, operation: str) -> str:
    """Temporary name of the file ``name`` during the operation with that id."""
    return f"{name}.{operation}.tmp"


def visible_files(cset: CheckpointSet) -> dict[Role, str]:
    """Paths of the members as a reader must see them, also in the middle of a commit.

    Raises:
        CheckpointError: damaged commit record.
    """
    # The record comes first: if a writer finishes meanwhile, its files have their final names.
    record = read_record(cset)
    names = set(_list(cset.directory))
    files = {
        role: os.path.join(cset.directory, name)
        for name in names
        if (role := cset.role_of(name)) is not None
    }
    if record is not None:
        for name in record.removals:
            files.pop(cset.role_of(name), None)
        for temporary, name in record.renames.items():
            if temporary in names:
                files[cset.role_of(name)] = os.path.join(cset.directory, temporary)
    return files


def final_path(path: str) -> str:
    """The name that a file will have when a commit is finished; most have it already."""
    directory, name = os.path.split(path)
    match = _TEMPORARY.fullmatch(name)
    return os.path.join(directory, match["final"]) if match else path


def read_record(cset: CheckpointSet) -> CommitRecord | None:
    """The commit record of an unfinished change, or None."""
    try:
        with open(cset.commit_path, encoding="utf-8") as file:
            stored = json.load(file)
        record = CommitRecord(dict(stored["renames"]), tuple(stored["removals"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{cset.commit_path}: damaged commit record ({error}); remove it if the files beside "
            "it load without it, else use another set"
        ) from error
    # a record may only ever touch its own set, whoever wrote it
    for temporary, name in record.renames.items():
        match = _TEMPORARY.fullmatch(temporary)
        if match is None or match["final"] != name or cset.role_of(name) is None:
            raise CheckpointError(f"{cset.commit_path}: strange entry {temporary!r} -> {name!r}")
    for name in record.removals:
        if cset.role_of(name) is None:
            raise CheckpointError(f"{cset.commit_path}: strange removal {name!r}")
    return record


def commit(cset: CheckpointSet, operation: str, keep: set[str], renamed: set[str]) -> None:
    """Steps 2 to 4: make the set consist of ``keep``, of which ``renamed`` have temporary files.

    On an error before the record is in place the temporary files are removed and the old set is
    untouched; on an error after it the message states that the new set is complete.

    Raises:
        CheckpointError: a temporary file is missing, or the file system failed.
    """
    try:
        renames = {temporary_name(name, operation): name for name in sorted(renamed)}
        present = set(_list(cset.directory))
        for temporary, name in renames.items():
            if temporary not in present:
                raise CheckpointError(
                    f"{cset.path_of(cset.role_of(name))}: its new content was written but rank 0 "
                    "does not see it; all ranks must save into one shared file system"
                )
        removals = sorted(name for name in present - keep if cset.role_of(name) is not None)
        record = CommitRecord(renames, tuple(removals))
        _write_record(cset, record, operation)
    except Exception:
        if not os.path.lexists(cset.commit_path):
            remove_temporaries(cset, operation)
            raise
        record = read_record(cset)
    try:
        _roll_forward(cset, record)
    except OSError as error:
        raise CheckpointError(
            f"{cset.path}: saved, but not all files could be renamed ({error}); the set can be "
            "loaded as it is, and the next save or recover() finishes it"
        ) from error


def recover_set(cset: CheckpointSet) -> bool:
    """Finish a change whose record is in place and clean up after one that failed before.

    Only the writer of the set may call this, and never while another process saves to it.

    Returns:
        Whether a commit was finished.
    """
    record = read_record(cset)
    if record is not None:
        logger.warning("%s: finishing a save that was interrupted", cset.path)
        _roll_forward(cset, record)
    remove_temporaries(cset)
    return record is not None


def remove_temporaries(cset: CheckpointSet, operation: str | None = None) -> None:
    """Remove temporary files of one operation, or of all; a failure is logged, not raised."""
    for name in _list(cset.directory):
        match = _TEMPORARY.fullmatch(name)
        if match is None or not _belongs(cset, match["final"]):
            continue
        if operation is None or name == temporary_name(match["final"], operation):
            try:
                _unlink(os.path.join(cset.directory, name))
            except OSError as error:
                logger.warning("could not remove a temporary file: %s", error)


def leave_in_order(cset: CheckpointSet, operation: str, ends_by_signal: bool) -> None:
    """For the writer of a set whose change ended before its time: no temporary file stays.

    A change that is not committed is undone; one that is, is finished where a signal ends the
    process. After an error it stays as it is: readable, as the error states. See
    :func:`.cleanup.cleaning_up`.
    """
    with contextlib.suppress(OSError, CheckpointError):
        if not os.path.lexists(cset.commit_path):
            remove_temporaries(cset, operation)
        elif ends_by_signal:
            recover_set(cset)


def unfinished_sets(directory: str) -> list[CheckpointSet]:
    """Sets of a directory that have a commit record or temporary files."""
    sets = set()
    for name in _list(directory):
        match = _TEMPORARY.fullmatch(name)
        final = match["final"] if match else name
        if match or final.endswith(".pt" + _COMMIT_SUFFIX):
            member = os.path.join(directory, final.removesuffix(_COMMIT_SUFFIX))
            sets.add(CheckpointSet.from_path(member))
    return sorted(sets, key=lambda cset: cset.path)


def temporary_files(cset: CheckpointSet) -> list[str]:
    """Names of this set's temporary files, whether a record lists them or not."""
    matches = ((name, _TEMPORARY.fullmatch(name)) for name in _list(cset.directory))
    return sorted(name for name, match in matches if match and _belongs(cset, match["final"]))


def _belongs(cset: CheckpointSet, final: str) -> bool:
    return cset.role_of(final.removesuffix(_COMMIT_SUFFIX)) is not None


def _write_record(cset: CheckpointSet, record: CommitRecord, operation: str) -> None:
    sync_directory(cset.directory)  # the new files' names must last before the record does
    name = os.path.basename(cset.commit_path)
    temporary = os.path.join(cset.directory, temporary_name(name, operation))
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"renames": record.renames, "removals": record.removals}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, cset.commit_path)
    sync_directory(cset.directory)


def _roll_forward(cset: CheckpointSet, record: CommitRecord) -> None:
    for temporary, name in record.renames.items():
        source = os.path.join(cset.directory, temporary)
        target = os.path.join(cset.directory, name)
        if os.path.lexists(source):
            os.replace(source, target)
            # rename() does nothing where both names are links to one file, as after copy_set
            _unlink(source)
        elif not os.path.lexists(target):
            raise CheckpointError(f"{target}: lost: neither it nor {temporary} is there")
    for name in record.removals:
        _unlink(os.path.join(cset.directory, name))
    sync_directory(cset.directory)
    _unlink(cset.commit_path)
    sync_directory(cset.directory)


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory or ".")
    except FileNotFoundError:
        return []


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
