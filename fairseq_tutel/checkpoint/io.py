"""Read and write one checkpoint file. Reading never runs code from the file.

Files are read by torch's restricted unpickler, extended by the classes of ``safe_globals.py``.
Tensors are memory-mapped if the file allows it, so that only used tensors are read.

torch writes a CRC-32 of every tensor into the file's zip directory, and never checks it. Here each
tensor is checked when it is taken from a file: other tensors stay unread, and none is read twice.
"""

import collections
import ctypes
import errno
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pickle import UnpicklingError
from typing import IO, Any

import torch

from .layout import CheckpointError
from .safe_globals import safe_globals_only

_ZIP_MAGIC = b"PK\x03\x04"
# errors that zipfile raises if the directory or the header of a member is damaged
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error)
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)|but got (<class .*?>)")
# file systems that cannot fsync a directory answer with one of these
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


def load_file(path: str) -> dict[str, Any]:
    """Read one file; its tensors are on the CPU, memory-mapped copy-on-write where possible.

    CheckpointError for a file that is missing, damaged, no dict, or holds a refused class.
    """
    before = identity(path)
    mappable = _check_container(path)
    try:
        with safe_globals_only():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except Exception as error:  # a damaged pickle can raise anything; the message names it
        raise CheckpointError(_reading_problem(path, error)) from None
    # torch opens the file twice, for its pickle and for the mapping: it must be the same file
    if identity(path) != before:
        raise CheckpointError(f"{path}: was replaced while it was being read; try again")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict")
    return state


def save_file(state: Mapping[str, Any], path: str) -> None:
    """Write one file, force it to the disk and check that it can be read back safely.

    Tied weights stay one tensor. A slice does not drag its stack into the file. CheckpointError
    for objects that ``load_file`` would refuse, OSError with the file's name if writing failed.
    """
    try:
        with open(path, "wb") as file:
            torch.save(_portable(dict(state), {}), file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # torch's writer raises a RuntimeError about positions once the file's write has failed
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise OSError(reason.errno, reason.strerror, path) from None
    try:
        load_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"refusing to save what could not be loaded: {error}") from error


class Checksums:
    """Checksums stored in a file; CheckpointError if its list of tensors is damaged.

    Nothing is checked in a file of torch's format before 1.6, in one written with
    ``torch.serialization.set_crc32_options(False)``, and with FAIRSEQ_TUTEL_CHECKSUMS=0.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._listed: set[tuple[int, int]] = set()  # (bytes, checksum)
        wanted = os.environ.get("FAIRSEQ_TUTEL_CHECKSUMS", "1") not in ("", "0")
        if not wanted or not _is_archive(path):
            return
        try:
            archive = zipfile.ZipFile(path)
        except _ZIP_ERRORS as error:
            raise CheckpointError(f"{path}: is damaged ({error})") from None
        with archive:
            for info in archive.infolist():
                name = info.filename.partition("/")[2]
                if name == "data.pkl" and _is_damaged(archive, info):
                    raise _wrong_checksum(path, info.filename)
                if name.startswith("data/") and info.CRC:
                    self._listed.add((info.file_size, info.CRC))

    def check(self, entries: Any) -> None:
        """Raise CheckpointError for a tensor (in dicts and lists) whose checksum is not stored."""
        if not self._listed:
            return
        found = {}
        for name, tensor in _tensors(entries, ""):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (name, storage))
        # zlib releases the interpreter's lock, so threads use all cores of this process
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            checksums = pool.map(_checksum, [storage for _, storage in found.values()])
            for (name, storage), checksum in zip(found.values(), checksums, strict=True):
                if (storage.nbytes(), checksum) not in self._listed:
                    raise _wrong_checksum(self._path, name)


def _is_archive(path: str, file: IO[bytes] | None = None) -> bool:
    """Return whether a file, maybe open, is a zip; CheckpointError if its end is damaged."""
    try:
        return zipfile.is_zipfile(file or path)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: is damaged ({error})") from None


def verify_file(path: str) -> None:
    """Read the whole file; raise CheckpointError naming the first part with a wrong checksum."""
    if _is_archive(path):  # torch's format before 1.6 has no checksums
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if _is_damaged(archive, info):
                    raise _wrong_checksum(path, info.filename)


def identity(path: str) -> tuple[int, ...] | None:
    """Return a value that changes when the file of that name is replaced; None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def sync_directory(path: str) -> None:
    """Force the names in a directory to the disk, on systems that can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _check_container(path: str) -> bool:
    """Return whether the file is a complete zip archive (torch >= 1.6), which can be mapped."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
            complete = magic == _ZIP_MAGIC and _is_archive(path, file)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not size or magic == _ZIP_MAGIC and not complete:
        what = f"is truncated at {size} bytes (its end is missing)"
        raise CheckpointError(f"{path}: {what}; copy it again or use another set")
    return complete


def _reading_problem(path: str, error: Exception) -> str:
    """Describe why torch could not read a file, without its advice to turn its safety off."""
    original = error.__context__ if isinstance(error.__context__, UnpicklingError) else error
    refused = _REFUSED.search(str(original)) if isinstance(original, UnpicklingError) else None
    if refused:
        return (
            f"{path}: holds {refused[1] or refused[2]}, which is not on the list of harmless "
            "classes; refusing to load it, since unpickling it could run code"
        )
    if "weights_only" in str(original):
        return f"{path}: is a TorchScript archive or of torch's old tar format; refusing to load it"
    reason = str(original).strip().partition("\n")[0]
    return (
        f"{path}: is not a checkpoint or is damaged ({type(original).__name__}: {reason}); "
        "copy it again or use another set"
    )


def _portable(value: Any, memo: dict[tuple, torch.Tensor]) -> Any:
    """Return ``value`` with tensors detached, on the CPU, dense, in storages of their own size."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if key not in memo or not value.numel():
            moved = value.detach().cpu().contiguous()
            if moved.untyped_storage().nbytes() != moved.numel() * moved.element_size():
                moved = moved.clone(memory_format=torch.contiguous_format)
            memo[key] = moved
        return memo[key]
    # a defaultdict comes back as a dict: the restricted unpickler cannot fill one
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        return {key: _portable(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(item, memo) for item in value)
    return value


def _wrong_checksum(path: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: is damaged: wrong checksum of {name}; copy it again or use another set"
    )


def _is_damaged(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if not info.CRC:  # written without a checksum
        return False
    try:
        with archive.open(info) as member:
            while member.read(1 << 20):  # to its end, where the checksum is compared
                pass
    except _ZIP_ERRORS:
        return True
    return False


def _tensors(entries: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(entries, torch.Tensor):
        if entries.layout == torch.strided:
            yield name, entries
    elif isinstance(entries, Mapping):
        for key, value in entries.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(entries, list | tuple):
        for number, value in enumerate(entries):
            yield from _tensors(value, f"{name}[{number}]")


def _checksum(storage: torch.UntypedStorage) -> int:
    data = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return zlib.crc32(memoryview(data).cast("B"))
