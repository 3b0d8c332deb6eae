"""torch.autocast on any device, those included that have none (meta), and what is not traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that the caller's autocast asks for on this device; None without one."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Context in which operations on this device keep the dtypes of their arguments."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def outside_checkpoints() -> AbstractContextManager:
    """Context whose saved tensors stay in memory: activation checkpointing does not count them.

    A recomputation may then leave out what the context computes.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def hooks_of(module: nn.Module) -> list[dict]:
    """Return the module's hooks on calls, by kind: forward, forward pre, backward, backward pre."""
    return [getattr(module, f"_{kind}") for kind in _HOOKS]


def is_observed(module: nn.Module) -> bool:
    """Whether somebody sees or replaces calls of the module: a profiler, fairseq's search for a NaN
    or its checkpoint_wrapper, which sets ``forward``.
    """
    everywhere = (getattr(nn.modules.module, f"_global_{kind}") for kind in _HOOKS)
    return "forward" in vars(module) or any(hooks_of(module)) or any(everywhere)


def untraced(function: Callable) -> Callable:
    """``torch.compiler.disable``, which imports the tracer, put off until the first call."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return call
