"""Change several files in one step: new files under temporary names, a redo log, then renames.

    1. write ``NAME.ID.tmp`` beside every NAME and force it to the disk
    2. write the commit record ``X.pt.commit``, one JSON file that appears by an atomic rename
    3. rename every temporary file into place, remove files that the new set does not have
    4. remove the commit record

A crash before step 2 leaves the old set. A crash after it leaves a complete new set, part of it
under temporary names that the record lists: readers follow the record (``visible_files``), and the
next writer finishes the work (``recover_set``). This is redo logging (Mohan et al., ARIES, ACM
TODS 17(1), 1992) with one record.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .io import sync_directory
from .layout import CheckpointError, CheckpointSet, Role

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"(?P<final>.+\.pt(?:\.commit)?)\.[0-9a-f]{16}\.tmp")
_COMMIT_SUFFIX = ".commit"
# Windows has no SIGHUP
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class CommitRecord:
    """Renames and removals that turn the old set into the new one; file names without directory."""

    renames: dict[str, str]  # temporary name -> final name
    removals: tuple[str, ...] = ()


def new_id() -> str:
    """Return 16 random hexadecimal digits: the id of a save, used in temporary names."""
    return secrets.token_hex(8)


def temporary_path(cset: CheckpointSet, operation: str, role: Role) -> str:
    """Return the path under which a member is written during the operation with that id."""
    return os.path.join(cset.directory, _temporary_name(cset.name_of(role), operation))


def visible_files(cset: CheckpointSet) -> dict[Role, str]:
    """Return the path of each member of the set, correct even in the middle of a commit."""
    # The record comes first: if a writer finishes meanwhile, its files have their final names.
    record = read_record(cset)
    names = set(_list(cset.directory))
    files = {role: name for name in names if (role := cset.role_of(name)) is not None}
    if record is not None:
        for name in record.removals:
            files.pop(cset.role_of(name), None)
        for temporary, name in record.renames.items():
            if temporary in names:
                files[cset.role_of(name)] = temporary
    return {role: os.path.join(cset.directory, name) for role, name in files.items()}


def final_path(path: str) -> str:
    """Return the name that a file has once a commit is finished; most files have it already."""
    directory, name = os.path.split(path)
    match = _TEMPORARY.fullmatch(name)
    return os.path.join(directory, match["final"]) if match else path


def read_record(cset: CheckpointSet) -> CommitRecord | None:
    """Return the record of an unfinished commit, or None; CheckpointError if it is damaged."""
    try:
        with open(cset.commit_path, encoding="utf-8") as file:
            stored = json.load(file)
        record = CommitRecord(dict(stored["renames"]), tuple(stored["removals"]))
        if not all(
            isinstance(n, str) for n in (*sum(record.renames.items(), ()), *record.removals)
        ):
            raise ValueError("has a file name that is no text")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{cset.commit_path}: damaged commit record ({error}); remove it if the files beside "
            "it load without it, else use another set"
        ) from error
    # a record may only touch its own set, whoever wrote it
    finals = [match and match["final"] for match in map(_TEMPORARY.fullmatch, record.renames)]
    members = [*record.renames.values(), *record.removals]
    if finals != [*record.renames.values()] or None in map(cset.role_of, members):
        raise CheckpointError(f"{cset.commit_path}: strange commit record: {record}")
    return record


@contextlib.contextmanager
def changing(cset: CheckpointSet) -> Iterator[str]:
    """Let one process change a set. Yield the id for :func:`temporary_path` and :func:`commit`."""
    os.makedirs(cset.directory or ".", exist_ok=True)
    recover_set(cset)
    operation = new_id()
    with cleaning_up(lambda by_signal: leave_in_order(cset, operation, by_signal)):
        yield operation


def commit(cset: CheckpointSet, operation: str, roles: Collection[Role]) -> None:
    """Run steps 2 to 4: make the set consist of ``roles``, which all have temporary files.

    After an error the old set is untouched, unless the message says that the new one is saved.
    """
    names = sorted(map(cset.name_of, roles))
    renames = {_temporary_name(name, operation): name for name in names}
    present = set(_list(cset.directory))
    for temporary, name in renames.items():
        if temporary not in present:
            raise CheckpointError(
                f"{os.path.join(cset.directory, name)}: its new content was written but rank 0 "
                "does not see it; all ranks must save into one shared file system"
            )
    removals = sorted(n for n in present.difference(names) if cset.role_of(n) is not None)
    record = CommitRecord(renames, tuple(removals))
    try:
        _write_record(cset, record, operation)
    except OSError:
        if not os.path.lexists(cset.commit_path):
            raise
    try:
        _roll_forward(cset, record)
    except OSError as error:
        raise CheckpointError(
            f"{cset.path}: saved, but not all files could be renamed ({error}); the set can be "
            "loaded as it is, and the next save finishes it"
        ) from error


def recover_set(cset: CheckpointSet) -> None:
    """Finish or undo an interrupted change; never while another process saves to the set."""
    record = read_record(cset)
    if record is not None:
        logger.warning("%s: finishing a save that was interrupted", cset.path)
        _roll_forward(cset, record)
    remove_temporaries(cset)


def remove_temporaries(cset: CheckpointSet, operation: str | None = None) -> None:
    """Remove temporary files of one operation, or of all; the next save retries on failure."""
    ending = ".tmp" if operation is None else f".{operation}.tmp"
    for name in _list(cset.directory):
        match = _TEMPORARY.fullmatch(name)
        if match and name.endswith(ending) and _set_of(cset.directory, match["final"]) == cset:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(cset.directory, name))


def leave_in_order(cset: CheckpointSet, operation: str, ends_by_signal: bool) -> None:
    """Undo a change that ended before its commit; finish a committed one if a signal ends it."""
    with contextlib.suppress(OSError, CheckpointError):
        if not os.path.lexists(cset.commit_path):
            remove_temporaries(cset, operation)
        elif ends_by_signal:
            recover_set(cset)


@contextlib.contextmanager
def cleaning_up(clean: Callable[[bool], None]) -> Iterator[None]:
    """Call ``clean`` if the block does not reach its end, also by SIGTERM and SIGHUP.

    ``clean`` takes whether a signal ends the process, may interrupt the block, and must not raise.
    Signals that the program ignores or handles are left to it.
    """

    def clean_and_end(signum, frame):
        clean(True)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    # handlers can be set in the main thread only
    main = threading.current_thread() is threading.main_thread()
    taken = [s for s in _SIGNALS if main and signal.getsignal(s) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, clean_and_end)
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        clean(False)
        raise
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)


def unfinished_sets(directory: str) -> set[CheckpointSet]:
    """Return sets of a directory that have a commit record or temporary files."""
    names = _list(directory)
    finals = [match["final"] for match in map(_TEMPORARY.fullmatch, names) if match]
    finals += [name for name in names if name.endswith(".pt" + _COMMIT_SUFFIX)]
    return {_set_of(directory, final) for final in finals}


def _set_of(directory: str, name: str) -> CheckpointSet:
    return CheckpointSet.from_path(os.path.join(directory, name.removesuffix(_COMMIT_SUFFIX)))


def _temporary_name(name: str, operation: str) -> str:
    return f"{name}.{operation}.tmp"


def _write_record(cset: CheckpointSet, record: CommitRecord, operation: str) -> None:
    sync_directory(cset.directory)  # the new files' names must last before the record does
    temporary = _temporary_name(cset.commit_path, operation)
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(record), file)
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
            Path(source).unlink(missing_ok=True)
        elif not os.path.lexists(target):
            raise CheckpointError(f"{target}: lost: neither it nor {temporary} is there")
    for name in record.removals:
        Path(cset.directory, name).unlink(missing_ok=True)
    sync_directory(cset.directory)
    Path(cset.commit_path).unlink(missing_ok=True)
    sync_directory(cset.directory)


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory or ".")
    except FileNotFoundError:
        return []
