"""After an update: the bias on the selection of experts follows their load, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..distributed import process_world, sum_tensor_over_ranks_
from ..moe import MoELayer
from .aux_losses import AuxLosses
from .model import moe_layers, unwrap


def update_load_bias(model: nn.Module, passes: Sequence[AuxLosses]) -> None:
    """Move the load biases of a model's MoE layers after a step of the optimizer. Collective.

    Not to be called for a step that was skipped, as by a GradScaler after an overflow.

    Args:
        model: wrapped or not; its layers have ``load_bias="sign"`` or ``"quantile"``.
        passes: of every forward pass since the step before, what :func:`collect_aux` found.

    Raises:
        ValueError: a pass without counts for every layer, as in evaluation.
    """
    layers = moe_layers(unwrap(model))
    total = None
    for found in passes:
        counts = {name: aux.bias_counts for name, aux in found.layers}
        lacking = [name for name in layers if counts.get(name) is None]
        if lacking or len(found.layers) != len(layers):
            raise ValueError(
                f"a forward pass has {len(found.layers)} reports of {len(layers)} MoE layers, "
                f"without counts of {lacking}: were they in training, with a load_bias?"
            )
        shapes = [counts[name].shape for name in layers]  # layers may differ in experts and rule
        flat = torch.cat([counts[name].flatten() for name in layers]).to(torch.int64)
        total = flat if total is None else total + flat
    if total is None:
        raise ValueError("update_load_bias needs the reports of at least one forward pass")
    if process_world()[1] > 1:
        sum_tensor_over_ranks_(total)
    parts = total.split([shape.numel() for shape in shapes])
    counts_L = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    update_load_biases(layers.values(), counts_L)


def update_load_biases(layers: Iterable[MoELayer], counts_L: Iterable[torch.Tensor]) -> None:
    """The same from counts that are summed already, one for each layer."""
    for layer, counts in zip(layers, counts_L, strict=True):
        layer.gate.update_load_bias(counts)
