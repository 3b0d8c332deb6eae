"""One checkpoint file: written so that it can be read safely, read without running its content.

A checkpoint is a pickle, and a pickle may call any function. Files are therefore read by torch's
restricted unpickler, extended by the classes of ``harmless.py``; anything else is refused by name.
Tensors are memory-mapped where the file allows it, so that only what is used is read.
"""

from __future__ import annotations

import collections
import errno
import logging
import os
import re
import zipfile
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from .errors import CheckpointError
from .harmless import harmless_only

logger = logging.getLogger(__name__)

_ZIP_MAGIC = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)|but got (<class .*?>)")
# file systems that cannot fsync a directory answer with one of these
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


def load_file(path: str) -> dict[str, Any]:
    """Read one file; its tensors are on the CPU, memory-mapped copy-on-write where possible.

    Raises:
        CheckpointError: missing, truncated, damaged, holding a refused class, or not a dict.
    """
    before = identity(path)
    mappable = _check_container(path)
    try:
        with harmless_only():
            state = _torch_load(path, mmap=mappable)
    except FileNotFoundError:
        raise _missing(path) from None
    except Exception as error:  # a damaged pickle can raise anything; the message names it
        raise CheckpointError(reading_problem(path, error)) from None
    # torch opens the file twice, for its pickle and for the mapping: it must be the same file
    if identity(path) != before:
        raise CheckpointError(f"{path}: was replaced while it was being read; try again")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: not a checkpoint: holds a {type(state).__name__}, not a dict"
        )
    return state


def save_file(state: Mapping[str, Any], path: str) -> int:
    """Write one file, force it to the disk and check that it can be read back safely.

    Tensors are written from the CPU with a storage of their own, so that a slice of a stack does
    not drag the whole stack into the file. Tensors that are one (tied weights) stay one.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointError: ``state`` holds objects that ``load_file`` would refuse.
        OSError: the file system failed (no space, no permission); names the file.
    """
    try:
        with open(path, "wb") as file:
            torch.save(_portable(dict(state), {}), file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except (OSError, RuntimeError) as error:
        # torch's writer raises a RuntimeError about positions once the file's write has failed
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise OSError(reason.errno, reason.strerror, path) from None
    try:
        load_file(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"refusing to save what could not be loaded again: {error}"
        ) from error
    return size


def identity(path: str) -> tuple[int, ...] | None:
    """Changes whenever the file of that name is replaced; None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def sync_directory(path: str) -> None:
    """Force the names in a directory to the disk, on file systems that can."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _check_container(path: str) -> bool:
    """Whether the file is a complete zip archive (torch >= 1.6), the kind that can be mapped."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
            complete = magic == _ZIP_MAGIC and zipfile.is_zipfile(file)
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size == 0:
        raise CheckpointError(f"{path}: is empty; restore it from a backup or use another set")
    if magic == _ZIP_MAGIC and not complete:
        raise CheckpointError(
            f"{path}: is truncated at {size} bytes (its end is missing); "
            "copy it again or use another set"
        )
    return complete


def _torch_load(path: str, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except RuntimeError as error:
        if not mmap or "unable to mmap" not in str(error):
            raise
        logger.warning("%s: the file system cannot map files; reading it whole", path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


def _missing(path: str) -> CheckpointError:
    return CheckpointError(f"{path}: no such file")


def reading_problem(path: str, error: Exception) -> str:
    """Why torch could not read a file; names the file and what in it was refused, if anything.

    torch wraps such words in advice to turn its safety off, which is never passed on.
    """
    original = error.__context__ if isinstance(error.__context__, UnpicklingError) else error
    refused = _REFUSED.search(str(original)) if isinstance(original, UnpicklingError) else None
    if refused:
        return (
            f"{path}: holds {refused[1] or refused[2]}, which is not on the list of harmless "
            "classes; refusing to load it, since unpickling it could run code"
        )
    if "weights_only" in str(original):
        return f"{path}: is a TorchScript archive or of torch's old tar format; refusing to load it"
    reason = str(original).strip().splitlines()[:1]
    return (
        f"{path}: is not a checkpoint or is damaged "
        f"({type(original).__name__}: {''.join(reason)}); copy it again or use another set"
    )


def _portable(value: Any, memo: dict[tuple, torch.Tensor]) -> Any:
    """``value`` with every tensor detached, on the CPU, dense in a storage of its own size."""
    if isinstance(value, torch.Tensor):
        return _portable_tensor(value, memo)
    # a defaultdict comes back as a dict: the restricted unpickler cannot fill one
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        return {key: _portable(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(item, memo) for item in value)
    return value


def _portable_tensor(tensor: torch.Tensor, memo: dict[tuple, torch.Tensor]) -> torch.Tensor:
    identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if identity not in memo or tensor.numel() == 0:
        moved = tensor.detach().cpu().contiguous()
        if moved.untyped_storage().nbytes() != moved.numel() * moved.element_size():
            moved = moved.clone(memory_format=torch.contiguous_format)
        memo[identity] = moved
    return memo[identity]
