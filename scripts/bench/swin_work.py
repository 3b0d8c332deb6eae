"""SwinV2-MoE of scripts/examples/swin_moe for the benchmarks, and its work by formula.

Counted are multiply-accumulates (MACs) of matrix products and of the patches' convolution. B
images, N tokens of an image, T = B N, C channels, w side of a window, R = E x capacity rows that
the experts compute (about f T). Of a block, forward::

    attention 4 T C^2 + 2 T w^2 C        feed-forward 8 T C^2, with experts 8 R C^2 + T C E

Of the dense formulation's masks each product adds T R C, of a layer: two in a forward pass
(dispatch, combine) and three in the backward pass (two of combine, one of dispatch, whose mask has
no gradient). R grows with T, so that this grows with the square of B. In evaluation this layer
computes only the rows that hold a token, T at most: there the formula leaves a part of the ratio
out.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

from presets import LayerShape
from record import ROOT

FOLDER = ROOT / "scripts" / "examples" / "swin_moe"
MASK_PRODUCTS = {"inference": 2, "training": 5}
PASSES = {"inference": 1, "training": 3}  # of every other product: a backward pass has two


def example(name: str) -> ModuleType:
    """A module of the example, whose files are programs beside each other, not a package."""
    sys.path.insert(0, str(FOLDER))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(FOLDER))


def sparse_layers(config, images: int) -> Iterator[LayerShape]:
    """The layers with experts of a ``SwinConfig`` on one rank."""
    for stage, blocks in enumerate(config.moe_blocks):
        tokens = images * (config.image // config.patch >> stage) ** 2
        dim = config.dim << stage
        options = {"top_k": config.moe["top_k"], "capacity_factor": config.moe["capacity_factor"]}
        for _ in blocks if config.num_experts else ():
            yield LayerShape(tokens, dim, 4 * dim, config.num_experts, **options)


def forward_macs(config, images: int) -> int:
    """MACs of a forward pass, with the experts' empty rows and without masks."""
    side, last = config.image // config.patch, len(config.depths) - 1
    total = images * side**2 * config.patch**2 * config.channels * config.dim
    for stage, (depth, heads) in enumerate(zip(config.depths, config.heads, strict=True)):
        tokens, dim = images * (side >> stage) ** 2, config.dim << stage
        window = min(config.window, side >> stage)
        attention = 4 * tokens * dim**2 + 2 * tokens * window**2 * dim
        position = (2 * window - 1) ** 2 * 512 * (2 + heads)  # once for a batch
        merging = 2 * tokens * dim**2 if stage < last else 0
        total += depth * (attention + position + 8 * tokens * dim**2) + merging
    for layer in sparse_layers(config, images):
        rows = layer.experts * layer.capacity
        total += 8 * (rows - layer.tokens) * layer.model_dim**2
        total += layer.tokens * layer.model_dim * layer.experts
    return total + images * (config.dim << last) * config.classes


def mask_macs(config, images: int) -> int:
    """MACs of one product of every layer's mask with its tokens, or its rows."""
    return sum(
        layer.tokens * layer.experts * layer.capacity * layer.model_dim
        for layer in sparse_layers(config, images)
    )


def expected_ratio(config, images: int, mode: str) -> float:
    """How many times the MACs of this model it has with masks; mode: of PASSES."""
    own = PASSES[mode] * forward_macs(config, images)
    return 1 + MASK_PRODUCTS[mode] * mask_macs(config, images) / own
