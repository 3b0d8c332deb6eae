"""Memory of experts for the backward pass, and its formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backends._fp8 import FP8, quantize_rows

MODES = ("fast", "lean", "minimal")
STORED = ("same", "fp8")  # formats of kept values


@dataclass(frozen=True)
class ActivationMemory:
    """Choice of what experts keep for the backward pass beside tokens and routing.

    ``fast`` keeps rows, values before and after the activation and outputs; ``lean`` only the
    values before the activation; ``minimal`` nothing, so that fc1 is applied again. Between ranks,
    ``lean`` also keeps the rows, because an exchange costs more than M numbers per row.
    """

    mode: str = "fast"
    storage: str = "same"  # what ``lean`` keeps: as the rows, or fp8 (with a scale per row)

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"activation_memory={self.mode!r} is none of {', '.join(MODES)}")
        if self.storage not in STORED:
            raise ValueError(f"activation_storage={self.storage!r} is none of {', '.join(STORED)}")
        if self.storage != "same" and self.mode != "lean":
            raise ValueError(
                f"activation_storage={self.storage!r} is for activation_memory='lean', not "
                f"{self.mode!r}"
            )

    @property
    def outputs(self) -> bool:
        """Whether outputs and values after the activation are kept."""
        return self.mode == "fast"

    @property
    def hidden(self) -> bool:
        """Whether values before the activation are kept, and rows that came from other ranks."""
        return self.mode != "minimal"

    def store(self, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return values [R, n * width] as they are kept, and the fp8 scales of each width."""
        if self.storage == "fp8":
            quantized, scale = quantize_rows(values.reshape(-1, width))
            return quantized.view(values.shape), scale
        return values, values.new_empty(0)


def restore(stored: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Return the values of :meth:`ActivationMemory.store` in the dtype of ``like``."""
    if stored.dtype != FP8:
        return stored
    wide = stored.view(len(scale), -1).float().mul_(scale[:, None]) if len(scale) else stored
    return wide.to(like.dtype).view(stored.shape)
