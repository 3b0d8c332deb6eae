"""Products of each expert's own rows, by candidate of the Triton backend.

    python scripts/bench/bench_products.py --device cuda --preset dropless-16,dropless-64,fine-128
    TRITON_INTERPRET=1 python scripts/bench/bench_products.py --tiny

Candidates are torch's grouped_mm, the kernel for every GPU, and each tile of the kernels with TMA,
with rows that are written, or gathered from tokens: torch's product writes them first. A known GPU
also has predicted times.

Good: the fastest candidate takes at most 1.05 times the time of grouped_mm, and less with rows that
are gathered.
"""

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Point, call, sweep
from layers import DTYPES, PRESETS, LayerShape
from predict import beside, rates_of
from program import Ranks, program, words

from fairseq_tutel.backends.triton import _grouped, _grouped_tma

OPTIONS = {"preset": (words, "shapes, one after the other (default: fine-128)", PRESETS)}


def rows_of_experts(shape: LayerShape, device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a drawn routing: end rows of the experts, and the pair of each row."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(shape.tokens, shape.experts, generator=generator)
    expert = drawn.topk(shape.top_k, dim=1).indices.flatten()
    ends = torch.bincount(expert, minlength=shape.experts).cumsum(0)
    pair = expert.argsort(stable=True)
    return ends.to(device, torch.int32), pair.to(device, torch.int32)


def candidates(first, weight, ends, source, gradient: bool) -> dict:
    """Return name -> a function without arguments, of rows written (``source`` None) or not."""
    if gradient:
        torchs, mine = _grouped._grouped_mm_gradient, _grouped_tma.weight_gradient_tma
        every, tiles = None, _grouped_tma.tma_tiles(gathers_sum=source is not None)
    else:
        torchs, mine = _grouped._grouped_mm, _grouped_tma.rows_product_tma
        every = _grouped._rows_product
        tiles = (*_grouped_tma.tma_tiles(), *_grouped_tma.tma_tiles(few_rows=True))
    given = first, weight, ends, source
    found = {"grouped_mm": partial(torchs, *given)}
    if every:
        found["every GPU"] = partial(every, *given)
    for tile in dict.fromkeys(tiles):
        size = f"{tile.block_r}x{tile.block_c}x{tile.block_d}, {tile.stages} stages"
        found[size] = partial(mine, *given, tile)
    return found


def points(name: str, shape: LayerShape, ranks: Ranks, seed: int) -> Iterator[Point]:
    """Yield fc1's product and weight gradient, with rows written and gathered, and that of fc2."""
    device, dtype = ranks.device, DTYPES[shape.dtype]
    M, F, experts = shape.model_dim, shape.hidden_dim, shape.experts
    ends, pair = rows_of_experts(shape, device, seed)
    source = _grouped_tma.Source(pair, shape.top_k)
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*size):
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    tokens, wide = draw(shape.tokens, M), draw(len(pair), F)
    rows = tokens[pair.long() // shape.top_k]
    fc1, fc2 = draw(experts, F, M).mT, draw(experts, M, F).mT
    for what, first, second, gathers, gradient in (
        ("fc1", (rows, tokens), fc1, True, False),
        ("fc2", (wide, None), fc2, False, False),
        ("gradient of fc1", wide, (rows, tokens), True, True),
    ):
        cases = []
        for number, of_rows in enumerate([None, source] if gathers else [None]):
            operands = [x[number] if isinstance(x, tuple) else x for x in (first, second)]
            found = candidates(*operands, ends, of_rows, gradient)
            prefix = "gathered " if number else ""
            for each, run in found.items():
                cases.append(Case(prefix + each, call(lambda _, run=run: run())))
        expected = rates_of(device)
        expected = expected and expected.products_ms(2 * len(pair) * M * F, shape.dtype)
        about = {"shape": str(shape), "settings": dataclasses.asdict(shape)}
        derive = partial(columns, expected=expected)
        yield Point(f"{name}: {what}", cases, about, {}, derive, phase="forward")


def columns(found, expected: float | None) -> dict[str, dict[str, float]]:
    """Return each candidate's time over torch's of the same rows, and beside the prediction."""
    ms = {case: of["forward"]["p50"] for case, of in found["ms"].items()}
    torchs = {gathers: ms.get(f"{gathers}grouped_mm") for gathers in ("", "gathered ")}
    derived = {}
    for case, taken in ms.items():
        torch_ms = torchs["gathered " if case.startswith("gathered") else ""]
        derived[case] = {"over grouped_mm": taken / torch_ms} if torch_ms else {}
        derived[case] |= beside(taken, expected)
    return derived


@program(__doc__, OPTIONS)
def main(options, ranks):
    ranks.expect(several=False)
    shapes = {name: PRESETS[name].shape for name in options.preset or ["fine-128"]}
    if options.tiny:
        shapes = {f"tiny-{name}": shape.tiny() for name, shape in shapes.items()}
    found = (each for given in shapes.items() for each in points(*given, ranks, options.seed))
    sweep("products", options, ranks, found, repetitions=20, file="products")


if __name__ == "__main__":
    sys.exit(main())
