"""Helpers for modes of torch: autocast, checkpointing, hooks and tracing."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..backends._torch_private import is_hooked, tracer_is_imported


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the caller's autocast on this device; None without autocast."""
    try:  # torch 2.11 cannot trace the question whether a device has autocast
        enabled = torch.is_autocast_enabled(device.type)
    except RuntimeError:  # "meta" has none
        return None
    return torch.get_autocast_dtype(device.type) if enabled else None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast on this device."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def outside_checkpoints() -> AbstractContextManager:
    """Return a context whose saved tensors stay in memory: activation checkpointing ignores them.

    A recomputation can then leave out what the context computes.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def is_observed(module: nn.Module) -> bool:
    """Return whether somebody hooks the module's calls or replaces its ``forward``.

    Profilers and fairseq's NaN detector add hooks; fairseq's checkpoint_wrapper sets ``forward``.
    """
    return "forward" in vars(module) or is_hooked(module)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is torch's linear layer, and its weights say all that it computes."""
    return type(module) is nn.Linear and not is_observed(module)


def call_in(linear: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Call a linear layer, or what a tool put in its place, in a dtype.

    The result is ``linear(x)`` for ``x`` and parameters in that dtype. Hooks, adapters and
    parametrizations work as on any module.
    """
    x = x.to(dtype)
    if is_plain_linear(linear):
        bias = None if linear.bias is None else linear.bias.to(dtype)
        return functional.linear(x, linear.weight.to(dtype), bias)
    others = {
        name: param.to(dtype)
        for name, param in linear.named_parameters()
        if param.is_floating_point() and param.dtype != dtype
    }
    return torch.func.functional_call(linear, others, (x,)) if others else linear(x)


def untraced(function: Callable) -> Callable:
    """Apply ``torch.compiler.disable`` once the tracer is imported; it would import it."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not tracer_is_imported():
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return call
