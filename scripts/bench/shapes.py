"""Shapes of one MoE layer; shapes.json has those with a name, and their goals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from program import Ranks, expect_known

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One MoE layer as one rank sees it: T, M, F, E over all ranks, K.

    Attributes:
        capacity_factor: f; K * int(f * ceil(T / E)) slots per expert and rank. 0: dropless.
        dtype: key of DTYPES.
        simulated_ranks: > 1: this process plays one rank of so many, each all-to-all is a copy.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int = 2
    capacity_factor: float = 1.0
    dtype: str = "float32"
    simulated_ranks: int = 0

    @property
    def capacity(self) -> int:
        """C, slots per expert and rank; without a capacity the rows of an even spread."""
        slots = int((self.capacity_factor or 1.0) * math.ceil(self.tokens / self.experts))
        return max(1, self.top_k * slots)

    def local_experts(self, world_size: int = 1) -> int:
        """e, experts of one rank of ``world_size`` real ones."""
        return max(1, self.experts // max(world_size, self.simulated_ranks))

    def rows(self, world_size: int = 1) -> int:
        """Rows that the local experts of one rank receive."""
        ranks = min(self.experts, max(world_size, self.simulated_ranks))
        return self.local_experts(world_size) * ranks * self.capacity

    def tiny(self) -> LayerShape:
        """Sizes of milliseconds on a CPU, to rehearse a benchmark; 4 ranks if simulated."""
        local, ranks = min(2, self.local_experts()), min(4, self.simulated_ranks)
        sizes = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": local * (ranks or 4)}
        return dataclasses.replace(self, **sizes, simulated_ranks=ranks)

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens, {self.model_dim}/{self.hidden_dim}, {self.experts} experts"
        factor = f"f = {self.capacity_factor:g}" if self.capacity_factor else "dropless"
        simulated = f", SIMULATED rank of {self.simulated_ranks}" if self.simulated_ranks else ""
        return f"{sizes}, top-{self.top_k}, {factor}, {self.dtype}{simulated}"


class Preset(NamedTuple):
    """A named shape; ``at_most`` are its goals: case -> this layer's time over the case's."""

    about: str
    shape: LayerShape
    at_most: dict[str, float]


_NAMED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PRESETS = {
    name: Preset(given["about"], LayerShape(*given["shape"]), given.get("at_most", {}))
    for name, given in _NAMED["layer"].items()
}
PEER_SHAPES = {name: LayerShape(*sizes) for name, sizes in _NAMED["peers"].items()}
# sizes in place of the preset's
SIZES: dict[str, tuple[Any, str]] = {
    "tokens": (int, "T, tokens of one rank"),
    "model-dim": (int, "M"),
    "hidden-dim": (int, "F, hidden dimension of an expert"),
    "experts": (int, "E over all ranks"),
    "top-k": (int, "experts per token"),
    "capacity-factor": (float, "0: dropless"),
    "dtype": (str, f"of {', '.join(DTYPES)}"),
    "simulated-ranks": (int, "play one rank of so many: each all-to-all becomes a copy"),
}


def choose_shape(
    options: argparse.Namespace, preset: str | None, ranks: Ranks
) -> tuple[str, LayerShape]:
    """Return name and shape of a preset, or of a command line with SIZES.

    On several ranks a preset of one simulated rank becomes the same local work on each.
    """
    world_size = ranks.world_size
    name = preset or ("meta-1.1t" if ranks.device.type == "cuda" else "cpu")
    expect_known("--preset", [name], list(PRESETS))
    shape = PRESETS[name].shape
    if world_size > 1:
        count = shape.local_experts() * world_size
        shape = dataclasses.replace(shape, experts=count, simulated_ranks=0)
    if options.tiny:
        name, shape = f"tiny-{name}", shape.tiny()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(LayerShape)}
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        shape, name = dataclasses.replace(shape, **given), "custom"
    expect_known("--dtype", [shape.dtype], list(DTYPES))
    for key, value in dataclasses.asdict(shape).items():
        zero = key in ("capacity_factor", "simulated_ranks")
        if key != "dtype" and (value < 0 or (value == 0 and not zero)):
            raise ValueError(f"--{key.replace('_', '-')} {value} must be positive")
    if shape.simulated_ranks > 1 and world_size > 1:
        raise ValueError(f"--simulated-ranks {shape.simulated_ranks} needs one rank")
    return name, shape
