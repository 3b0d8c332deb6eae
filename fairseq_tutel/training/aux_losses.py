"""What the MoE layers of a model report beside their outputs, without the model handing it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..distributed import process_world, sum_tensor_over_ranks_
from ..moe import MoEAux, MoELayer, balance_over_ranks
from ..moe.model import moe_layers


class AuxLosses:
    """What the MoE layers of a model returned beside their outputs in one forward pass.

    Attributes:
        layers: (name of the layer, its :class:`~fairseq_tutel.moe.MoEAux`), in the order of calls.
    """

    def __init__(self):
        self.layers: list[tuple[str, MoEAux]] = []

    @property
    def loss(self) -> torch.Tensor:
        """The sum of the layers' aux losses, to be weighted and added to the task's loss.

        Inside :func:`collect_aux` and with ``balance_scope="global"`` collective.

        Raises:
            RuntimeError: no layer was called.
        """
        if not self.layers:
            raise RuntimeError("no MoELayer was called inside collect_aux")
        self.finish()
        return torch.stack([aux.loss for _, aux in self.layers]).sum()

    def finish(self) -> None:
        """Add the balance losses that need the counts of all ranks; :func:`collect_aux` does it."""
        names = [name for name, _ in self.layers]
        finished = balance_over_ranks(aux for _, aux in self.layers)
        self.layers = list(zip(names, finished, strict=True))


@contextmanager
def collect_aux(model: nn.Module) -> Iterator[AuxLosses]:
    """Collect what the model's MoE layers return besides their output.

    Within, the layers are asked for it, and whoever calls them gets what they would without. What
    activation checkpointing computes again in the backward pass, outside, does not count twice::

        with collect_aux(model) as aux:
            y = model(x)
        loss = task_loss(y) + 0.01 * aux.loss

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the layers without gradients first;
    their aux losses then have none. Modules that ``torch.compile`` has compiled ask no hooks.
    Collective at its end with ``balance_scope="global"``: one reduction for all layers.
    """
    found = AuxLosses()
    handles = []
    for name, layer in moe_layers(model).items():
        handles += _listen(found, name, layer)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    found.finish()


def _listen(found, name, layer):
    asked = []  # whether the caller wants the second result too; a stack, for nested calls

    def ask(module, args, kwargs):
        asked.append(kwargs.get("return_aux", False))
        # finished outside: a recomputation does not run this hook and must do what this call does
        return args, {"balance_later": not asked[-1], **kwargs, "return_aux": True}

    def take(module, args, kwargs, result):
        y, aux = result
        found.layers.append((name, aux))
        return result if asked.pop() else y

    return [
        layer.register_forward_pre_hook(ask, with_kwargs=True),
        layer.register_forward_hook(take, with_kwargs=True),
    ]


def update_load_bias(
    model: nn.Module,
    passes: Sequence[AuxLosses],
    held_back: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Move the load biases of a model's MoE layers after a step of the optimizer. Collective.

    The bias on the selection of experts follows their load, on all ranks alike. Not to be called
    for a step that was skipped, as by a GradScaler after an overflow.

    Args:
        model: wrapped or not; its layers have ``load_bias="sign"`` or ``"quantile"``.
        passes: of every forward pass since the step before, what :func:`collect_aux` found.
        held_back: biases of experts that follow a schedule, by the name of the layer and a dot:
            what :func:`fairseq_tutel.checkpoint.growth.held_back` returns for a set that
            ``checkpoint grow --exact`` made.

    Raises:
        ValueError: a pass without counts for every layer, as in evaluation.
    """
    layers = moe_layers(model)
    if not passes:
        raise ValueError("update_load_bias needs the reports of at least one forward pass")
    total = 0
    for found in passes:
        counts = {name: aux.bias_counts for name, aux in found.layers}
        lacking = [name for name in layers if counts.get(name) is None]
        if lacking or len(found.layers) != len(layers):
            raise ValueError(
                f"a forward pass has {len(found.layers)} reports of {len(layers)} MoE layers, "
                f"without counts of {lacking}: were they in training, with a load_bias?"
            )
        shapes = [counts[name].shape for name in layers]  # layers may differ in experts and rule
        total = total + torch.cat([counts[name].flatten() for name in layers]).to(torch.int64)
    if process_world()[1] > 1:
        sum_tensor_over_ranks_(total)
    parts = total.split([shape.numel() for shape in shapes])
    counts_L = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    held_L = [(held_back or {}).get(f"{name}." if name else "") for name in layers]
    update_load_biases(layers.values(), counts_L, held_L)


def update_load_biases(
    layers: Iterable[MoELayer],
    counts_L: Iterable[torch.Tensor],
    held_L: Iterable[torch.Tensor | None],
) -> None:
    """The same from counts that are summed already, and held biases, one for each layer."""
    for layer, counts, held_E in zip(layers, counts_L, held_L, strict=True):
        layer.gate.update_load_bias(counts, held_E)
