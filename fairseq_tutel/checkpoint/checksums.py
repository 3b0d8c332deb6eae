"""Flipped bits: what was read against the checksums that were stored when it was written.

torch writes a CRC-32 of every tensor into the file's zip directory and never looks at it again.
Tensors are checked as they are taken from the file, not the file as a whole, so that memory-mapped
unwanted data stays unread and wanted data is fetched from the disk once.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .errors import CheckpointError

# what zipfile raises where the directory or the header of a member is damaged
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error)
_WORTH_THREADS = 1 << 24  # bytes
_VARIABLE = "FAIRSEQ_TUTEL_CHECKSUMS"


def damaged_member(path: str) -> str | None:
    """Name of the first part of a checkpoint whose checksum is wrong; reads the whole file."""
    if not zipfile.is_zipfile(path):
        return None  # torch's format before 1.6 has no checksums
    with zipfile.ZipFile(path) as archive:
        return next((info.filename for info in archive.infolist() if _damaged(archive, info)), None)


class Checksums:
    """The checksums stored in a file.

    There are none for a file in torch's format before 1.6, of one written where
    ``torch.serialization.set_crc32_options(False)`` or on a machine of the other byte order, and
    where the environment has FAIRSEQ_TUTEL_CHECKSUMS=0; then nothing is checked.

    Raises:
        CheckpointError: the pickle itself, which lists the tensors and their places, is damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._checked: set[int] = set()
        self._listed: set[tuple[int, int]] = set()
        if os.environ.get(_VARIABLE, "1") in ("", "0") or not zipfile.is_zipfile(path):
            return
        try:
            with zipfile.ZipFile(path) as archive:
                self._read(archive)
        except CheckpointError:
            raise
        except _ZIP_ERRORS as error:
            raise CheckpointError(f"{path}: is damaged ({error})") from None

    def check(self, entries: Any) -> None:
        """Check the tensors among ``entries``, in dicts and lists of any depth, once each.

        Raises:
            CheckpointError: names a tensor that is not as it was written.
        """
        if not self._listed:
            return
        found = {}
        for name, tensor in _tensors(entries, ""):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._checked:
                found.setdefault(storage.data_ptr(), (name, storage))
        storages = [storage for _, storage in found.values()]
        for (name, _), listed in zip(found.values(), self._match(storages), strict=True):
            if not listed:
                raise CheckpointError(
                    f"{self._path}: is damaged: wrong checksum of {name}; copy it again or use "
                    "another set"
                )
        self._checked.update(found)

    def _match(self, storages: list[torch.UntypedStorage]) -> list[bool]:
        def matches(storage: torch.UntypedStorage) -> bool:
            return (storage.nbytes(), _checksum(storage)) in self._listed

        if sum(storage.nbytes() for storage in storages) < _WORTH_THREADS:
            return list(map(matches, storages))
        # zlib lets go of the interpreter's lock: as many at once as this process may use cores
        with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
            return list(pool.map(matches, storages))

    def _read(self, archive: zipfile.ZipFile) -> None:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if name == "byteorder" and info.CRC and archive.read(info) != sys.byteorder.encode():
                self._listed.clear()
                return
            if name == "data.pkl" and _damaged(archive, info):
                raise CheckpointError(
                    f"{self._path}: is damaged: wrong checksum of {info.filename}; copy it again "
                    "or use another set"
                )
            if name.startswith("data/") and info.CRC:
                self._listed.add((info.file_size, info.CRC))


def _damaged(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if not info.CRC:  # written without
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
