"""Memory of experts for the backward pass, and its formats."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends._fp8 import quantize_rows
from ..config import STORED_FORMATS

MODES = ("fast", "lean", "minimal")


@dataclass(frozen=True)
class ActivationMemory:
    """Choice of what experts keep for the backward pass beside tokens and routing.

    ``fast`` keeps rows, values before and after the activation and outputs; ``lean`` only the
    values before the activation; ``minimal`` nothing, so that fc1 is applied again. Between ranks,
    ``lean`` also keeps the rows, because an exchange costs more than M numbers per row.
    :func:`.expert_ffn.routed_ffn` takes ``lean`` for ``fast`` where that moves fewer bytes.
    """

    mode: str = "fast"
    storage: str = "same"  # format in which ``lean`` keeps them

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"activation_memory={self.mode!r} is none of {', '.join(MODES)}")
        if self.storage not in STORED_FORMATS:
            known = ", ".join(STORED_FORMATS)
            raise ValueError(f"activation_storage={self.storage!r} is none of {known}")
        if self.storage != "same" and self.mode != "lean":
            raise ValueError(
                f"activation_storage={self.storage!r} is for activation_memory='lean', not "
                f"{self.mode!r}"
            )

    def __str__(self) -> str:
        return f"{self.mode} {self.storage}"

    @property
    def outputs(self) -> bool:
        """Whether outputs and values after the activation are kept."""
        return self.mode == "fast"

    @property
    def hidden(self) -> bool:
        """Whether values before the activation are kept, and rows that came from other ranks."""
        return self.mode != "minimal"

    def stored_bytes(self, element: int) -> int:
        """Return the bytes of a kept value of rows whose numbers have ``element`` bytes."""
        name = STORED_FORMATS[self.storage].dtype
        return element if name is None else getattr(torch, name).itemsize

    def store(self, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return values [R, n * width] as they are kept, and the scales of each width; or (0,)."""
        chosen = STORED_FORMATS[self.storage]
        dtype = values.dtype if chosen.dtype is None else getattr(torch, chosen.dtype)
        if chosen.scaled:
            quantized, scale = quantize_rows(values.reshape(-1, width), dtype)
            return quantized.view(values.shape), scale
        return values.to(dtype), values.new_empty(0)


@functools.cache
def memory_of(text: str) -> ActivationMemory | None:
    """Return the memory that ``str`` wrote for an operator's argument; None for an empty text."""
    return ActivationMemory(*text.split()) if text else None


def restore(stored: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Return the values of :meth:`ActivationMemory.store` in the dtype of ``like``."""
    if stored.dtype == like.dtype and not len(scale):
        return stored
    wide = stored.view(len(scale), -1).float().mul_(scale[:, None]) if len(scale) else stored
    return wide.to(like.dtype).view(stored.shape)
