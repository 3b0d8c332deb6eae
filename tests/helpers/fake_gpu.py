"""A GPU that only this package and its tests see, to run what a machine with one would run."""

import os
import sys

import torch

# These get the true answer: they would put tensors on the GPU.
_OTHERS = ("torch", "triton", "fairseq", "fairseq_cli")
_torch_says = torch.cuda.is_available


def install() -> bool:
    """Fake a GPU if ``FAKE_GPU`` is set, or if torch claims one but counts none (another fake).

    Returns:
        Whether the machine has a GPU of its own.
    """
    has_gpu = _torch_says() and torch.cuda.device_count() > 0
    if not has_gpu and (os.environ.get("FAKE_GPU") or _torch_says()):
        torch.cuda.is_available = _is_available
    return has_gpu


def _is_available() -> bool:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return caller.partition(".")[0] not in _OTHERS
