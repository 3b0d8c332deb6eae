"""Layers for evaluation, side by side: what bench_layer.py --mode eval and bench_generate.py time.

What to expect of the products: this layer computes ``4 K T M F`` operations, and one with C rows
for each expert and masks of S x E x C ``4 E C M F + 4 E C T M``, so that the ratio is

    E C / (K T) * (1 + T / F)

with ``C = 0.25 T`` at Meta's default of evaluation, whatever K and E are, and ``C = K T / E`` at
the capacity of training. Kernels, dispatch and what waits for memory come on top.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from dense_reference import DenseMoE, gating
from peers import meta_layer, tutel_layer
from presets import LayerShape
from torch import Tensor, nn

from fairseq_tutel.moe import MoELayer

META_FRACTION = 0.25  # its default for evaluation
ABOUT = {
    "layer": "this layer: nothing is dropped, no row is padded",
    "products": "products of the chosen experts alone: two F.linear for each",
    "bf16": "this layer, experts in bf16",
    "int8": "this layer, experts in int8",
    "dense": "dense S x E x C formulation (GShard), 0.25 T rows per expert",
    "meta": "Meta's layer at its default evaluation capacity, 0.25 T",
    "meta-training": "Meta's layer at its training capacity",
    "tutel": "Tutel's layer, capacity 0: as many rows as the fullest expert needs",
    "flop-matched": "a dense network of as many operations per token",
}
Layer = Callable[[Tensor], Tensor]


class FFN(nn.Sequential):
    """Two linear layers, K F wide, with a gelu between them."""

    def __init__(self, shape: LayerShape):
        hidden = shape.top_k * shape.hidden_dim
        up, down = nn.Linear(shape.model_dim, hidden), nn.Linear(hidden, shape.model_dim)
        super().__init__(up, nn.GELU(), down)


def make_layer(shape: LayerShape) -> MoELayer:
    """This layer for evaluation."""
    sizes = (shape.model_dim, shape.experts, shape.hidden_dim)
    factor = shape.capacity_factor
    return MoELayer(*sizes, top_k=shape.top_k, capacity_factor=factor, seed=1).eval()


def dense_at_fraction(layer: MoELayer, fraction: float) -> Layer:
    """The dense formulation with a fixed share of the tokens for every expert."""
    dense = DenseMoE(layer)

    def run(x_TM):
        capacity = math.ceil(fraction * len(x_TM))
        combine_TEC, _, _ = gating(layer.gate.logits(x_TM), layer.config.top_k, capacity)
        return dense._moe(x_TM, combine_TEC.to(x_TM.dtype), combine_TEC.bool())

    return run


def products_alone(layer: MoELayer) -> Layer:
    """The floor: what is chosen is found out in the first call on each set of tokens."""
    known: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    up, down = layer.experts.fc1_weight, layer.experts.fc2_weight

    def run(x_TM):
        if x_TM.data_ptr() not in known:
            chosen_TK = layer.gate.logits(x_TM).topk(layer.config.top_k).indices
            known[x_TM.data_ptr()] = [
                (x_TM[(chosen_TK == expert).any(1)], up[expert], down[expert])
                for expert in chosen_TK.unique().tolist()
            ]
        for rows_NM, first, second in known[x_TM.data_ptr()]:
            y_NM = nn.functional.linear(nn.functional.linear(rows_NM, first), second)
        return y_NM

    return run


def expected_ratio(name: str, shape: LayerShape) -> float | None:
    """Operations of a case over this layer's, by the formula; None where there is none."""
    tokens, wide = shape.tokens, 1 + shape.tokens / shape.hidden_dim
    if name in ("dense", "meta"):
        rows = shape.experts * math.ceil(META_FRACTION * tokens)
        return rows / (shape.top_k * tokens) * wide
    if name == "meta-training":
        return shape.experts * shape.capacity / (shape.top_k * tokens) * wide
    return 1.0 if name in ("layer", "flop-matched") else None


def layers_of(
    shape: LayerShape,
    layer: MoELayer,
    *,
    tutel: Path | None,
    meta: Path | None,
    stored: tuple[str, ...] = (),
) -> tuple[dict[str, Layer], dict[str, str]]:
    """Functions [T, M] -> [T, M] by the names of ABOUT, and name -> reason of those missing."""
    device = next(layer.parameters()).device
    found: dict[str, Layer] = {"layer": layer}
    missing: dict[str, str] = {}
    found["products"] = products_alone(layer)
    if stored:  # older versions, which may be measured, too, have none
        from fairseq_tutel.moe import hold_experts
    for storage in stored:
        other = make_layer(shape)
        other.experts = hold_experts(layer.experts, storage)
        other.gate = layer.gate
        found[storage] = other
    builders = {
        "meta": (meta, lambda: meta_layer(meta, shape, None, META_FRACTION)),
        "meta-training": (meta, lambda: meta_layer(meta, shape, None, -1.0)),
        "tutel": (tutel, lambda: tutel_layer(tutel, shape, 0.0)),
    }
    found["dense"] = dense_at_fraction(layer, META_FRACTION)
    for name, (folder, build) in builders.items():
        if folder is None:
            missing[name] = "no folder was given"
            continue
        try:
            peer = build()
        except ValueError as error:
            missing[name] = str(error)
            continue
        peer.module.to(device).eval()
        found[name] = lambda x, run=peer.run: run(x)[0]
    found["flop-matched"] = FFN(shape).to(device, next(layer.parameters()).dtype).eval()
    return found, missing


def random_tokens(shape: LayerShape, seed: int, count: int = 3) -> list[Tensor]:
    """Sets of tokens that take turns."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape.tokens, shape.model_dim)
    return [torch.randn(sizes, generator=generator) for _ in range(count)]
