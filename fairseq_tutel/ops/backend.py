"""Choice of the backend that operators run: ``auto``, ``triton`` or ``torch``."""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from ..backends import torch as torch_backend

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "torch")

_requested = "auto"
_chosen: dict[tuple[str, str], str] = {}  # requested name, kind of device -> backend


def _why_no_triton() -> str | None:
    """Return why the kernels cannot be imported, None if they can. Does not import triton."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "triton is not installed"
    if not Path(spec.origin).with_name("knobs.py").exists():  # part of triton since 3.4
        return "the installed triton is too old, 3.6 is needed (it comes with torch 2.10)"
    return None


# looked for once, here: torch.compile would search inside of the traced code
_NO_TRITON = _why_no_triton()


def _why_not_triton(device_type: str) -> str | None:
    """Return why Triton kernels cannot run on the device, None if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if _NO_TRITON is None and device_type != "cuda" and not interpreted:
        return f"device {device_type!r} is no GPU and TRITON_INTERPRET is not set"
    return _NO_TRITON


def set_backend(name: str) -> None:
    """Choose the backend of all operators in this process.

    ``auto`` (Triton on GPUs if it is installed, else torch), ``triton`` or ``torch``. Raise
    ValueError for another name, or if triton cannot run here.
    """
    global _requested
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    if name == "triton":
        reason = _why_not_triton("cuda" if torch.cuda.is_available() else "cpu")
        if reason is not None:
            raise ValueError(f"backend 'triton' cannot run here: {reason}")
    _requested = name


def get_backend() -> str:
    """Return the name last given to :func:`set_backend` (``auto`` at the start)."""
    return _requested


def backend_for(device: torch.device | str) -> str:
    """Return ``triton`` or ``torch``, the backend of the operators on tensors of this device.

    The choice is made and logged once per requested name and kind of device. Raise ValueError if
    the backend was set to triton and the device cannot run it.
    """
    device_type = device.type if isinstance(device, torch.device) else torch.device(device).type
    name = _chosen.get((_requested, device_type))
    if name is not None:
        return name
    name, why = "torch", _requested
    if _requested == "triton" or (_requested == "auto" and device_type == "cuda"):
        reason = _why_not_triton(device_type)
        if reason is None:
            name = "triton"
        elif _requested == "triton":
            raise ValueError(f"backend 'triton' cannot run: {reason}")
        else:
            why = f"auto: {reason}"
    # Traced code must not log. Its operators ask again when they run, outside of the trace.
    if not torch.compiler.is_compiling():
        _chosen[_requested, device_type] = name
        logger.info("MoE operators on %s: %s backend (%s)", device_type, name, why)
    return name


@functools.cache
def _triton_backend() -> ModuleType:
    """Import the backend at its first use, because a CPU-only install may lack triton."""
    return importlib.import_module("..backends.triton", __package__)


def implementation(function: str, tensor: torch.Tensor) -> Callable:
    """Return the backend's function of this name for the tensor's device and dtype.

    Return torch's if there is no Triton kernel, because torch's own library is fastest there on a
    GPU too, and for fp64. Raise ValueError for fp64 if triton was requested.
    """
    if backend_for(tensor.device) == "triton":
        triton_backend = _triton_backend()
        if hasattr(triton_backend, function):
            if tensor.dtype != torch.float64:
                return getattr(triton_backend, function)
            if _requested == "triton":
                raise ValueError("backend 'triton' handles fp32, fp16 and bf16, got torch.float64")
    return getattr(torch_backend, function)
