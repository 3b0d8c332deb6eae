"""Shapes that the benchmarks know by name, and what each must reach."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass

import torch
from ranks import Ranks

LAYER_BACKENDS = ("triton", "torch")
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer as one rank sees it.

    Attributes:
        tokens: T of this rank.
        model_dim, hidden_dim: M, F.
        experts: E over all ranks.
        top_k: K.
        capacity_factor: f; K * int(f * ceil(T / E)) slots per expert and rank.
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
        """C, slots per expert and rank."""
        slots = int(self.capacity_factor * math.ceil(self.tokens / self.experts))
        return max(1, self.top_k * slots)

    def local_experts(self, world_size: int) -> int:
        """e, experts of one rank of ``world_size`` real ones."""
        return max(1, self.experts // max(world_size, self.simulated_ranks))

    def rows(self, world_size: int) -> int:
        """Rows that the local experts of one rank receive."""
        ranks = min(self.experts, max(world_size, self.simulated_ranks))
        return self.local_experts(world_size) * ranks * self.capacity

    def on_ranks(self, world_size: int) -> LayerShape:
        """The same local work on so many real ranks in place of simulated ones."""
        if world_size == 1:
            return self
        local = max(1, self.experts // max(1, self.simulated_ranks))
        return dataclasses.replace(self, experts=local * world_size, simulated_ranks=0)

    def tiny(self) -> LayerShape:
        """Cut down to milliseconds on a CPU, to rehearse a benchmark; on 4 ranks if simulated."""
        local, ranks = min(2, self.local_experts(1)), min(4, self.simulated_ranks)
        sizes = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": local * (ranks or 4)}
        return dataclasses.replace(self, **sizes, simulated_ranks=ranks)


@dataclass(frozen=True)
class Goal:
    """Times of two cases, forward and backward, whose ratio must reach a bound, or stay below it.

    The case ``layer`` is this layer's first backend; ``device`` is where the goal holds.
    """

    text: str
    numerator: str
    denominator: str
    bound: float
    at_most: bool = False
    device: str = "cuda"


@dataclass(frozen=True)
class Preset:
    """A named shape with its source and goals."""

    about: str
    shape: LayerShape
    goals: tuple[Goal, ...] = ()


def _paper(tokens: int, dim: int, ranks: int = 16) -> LayerShape:
    return LayerShape(tokens, dim, dim, experts=2 * ranks, dtype="bfloat16", simulated_ranks=ranks)


def _meta(ranks: int) -> LayerShape:
    return LayerShape(24576, 4096, 16384, experts=ranks, dtype="bfloat16", simulated_ranks=ranks)


def _faster_than_dense(times: float, device: str = "cuda") -> Goal:
    text = f"at least {times:g} times faster than the dense formulation"
    return Goal(text, "dense", "layer", times, device=device)


def _near_products(times: float) -> Goal:
    text = f"at most {times:g} times the experts' products alone"
    return Goal(text, "layer", "products", times, at_most=True)


def _near_experts(times: float) -> Goal:
    text = f"at most {times:g} times the experts alone"
    return Goal(text, "layer", "experts", times, at_most=True, device="cpu")


PRESETS = {
    "fig14": Preset(
        "figure 14 of arXiv 2206.03382: 16384 tokens, D = H = 2048, 2 local experts, top-2, f = 1, "
        "as one GPU of 16 sees it",
        _paper(16384, 2048),
        (_faster_than_dense(5.0),),
    ),
    **{
        f"memory-{tokens}": Preset(
            f"memory table of arXiv 2206.03382: {tokens} tokens, D = H = 4096, 2 local experts, "
            "top-2, as one GPU of 16 sees it",
            _paper(tokens, 4096),
        )
        for tokens in (4096, 8192, 16384, 32768)
    },
    "meta-1.1t": Preset(
        "one MoE layer of Meta's 1.1T model as one GPU of 512 sees it: 24576 tokens, 4096/16384, "
        "512 experts, 1 local expert with 512 x 96 rows",
        _meta(512),
        (_near_products(1.10),),
    ),
    "meta-8gpu": Preset(
        "the same layer with one expert per GPU on 8 GPUs: 8 experts, 1 local expert with "
        "8 x 6144 rows",
        _meta(8),
        (_near_products(1.10),),
    ),
    "blog-8gpu": Preset(
        "the announcement's single layer on 8 GPUs (8.49 times fairseq's); it names no shape, so "
        "this is that of figure 14 with 16 experts",
        _paper(16384, 2048, ranks=8),
        (_faster_than_dense(8.5),),
    ),
    "cpu": Preset(
        "2 CPU cores: 4096 tokens, 256/1024, 8 experts, top-2",
        LayerShape(4096, 256, 1024, experts=8),
        (_faster_than_dense(5.0, "cpu"), _near_experts(1.07)),
    ),
    "cpu-small": Preset(
        "2 CPU cores: 2048 tokens, 256/1024, 8 experts, top-1: small work, where overheads show",
        LayerShape(2048, 256, 1024, experts=8, top_k=1),
        (_near_experts(1.15),),
    ),
    "cpu-large": Preset(
        "2 CPU cores: 4096 tokens, 512/2048, 8 experts, top-2",
        LayerShape(4096, 512, 2048, experts=8),
        (_near_experts(1.07),),
    ),
    "cpu-memory": Preset(
        "2 CPU cores: 32768 tokens, where the dense masks alone need more than 25 GB",
        LayerShape(32768, 256, 1024, experts=8),
    ),
}


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Sizes in place of the preset's."""
    add = parser.add_argument_group("sizes, in place of the preset's").add_argument
    add("--tokens", type=int, help="T, tokens of one rank")
    add("--model-dim", type=int, help="M")
    add("--hidden-dim", type=int, help="F, hidden dimension of an expert")
    add("--experts", type=int, help="E over all ranks")
    add("--top-k", type=int, help="experts per token")
    add("--capacity-factor", type=float, help="> 0")
    add("--dtype", choices=list(DTYPES))
    play = "play one rank of W: each all-to-all becomes a copy (0: all experts are here)"
    add("--simulate-ranks", type=int, metavar="W", dest="simulated_ranks", help=play)


def choose_shape(
    options: argparse.Namespace, preset: str | None, ranks: Ranks
) -> tuple[str, LayerShape]:
    """Preset's name and shape of a command line with :func:`add_size_options`.

    Raises:
        ValueError: sizes that make no layer.
    """
    world_size = ranks.world_size
    name = preset or ("meta-1.1t" if ranks.device.type == "cuda" else "cpu")
    shape = PRESETS[name].shape.on_ranks(world_size)
    if options.tiny:
        name, shape = f"tiny-{name}", shape.tiny()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(LayerShape)}
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        shape, name = dataclasses.replace(shape, **given), "custom"
    for key, value in dataclasses.asdict(shape).items():
        if key not in ("dtype", "simulated_ranks") and value <= 0:
            raise ValueError(f"--{key.replace('_', '-')} {value} must be positive")
    if shape.simulated_ranks > 1 and world_size > 1:
        raise ValueError(
            f"--simulate-ranks {shape.simulated_ranks} runs on one rank, not on {world_size}"
        )
    return name, shape
