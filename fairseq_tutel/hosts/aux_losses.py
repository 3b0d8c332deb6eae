"""The aux losses of a forward pass, without the model handing them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..moe import MoEAux
from .model import moe_layers


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

        Raises:
            RuntimeError: no layer was called.
        """
        if not self.layers:
            raise RuntimeError("no MoELayer was called inside collect_aux")
        return torch.stack([aux.loss for _, aux in self.layers]).sum()


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


def _listen(found, name, layer):
    asked = []  # whether the caller wants the second result too; a stack, for nested calls

    def ask(module, args, kwargs):
        asked.append(kwargs.get("return_aux", False))
        return args, {**kwargs, "return_aux": True}

    def take(module, args, kwargs, result):
        y, aux = result
        found.layers.append((name, aux))
        return result if asked.pop() else y

    return [
        layer.register_forward_pre_hook(ask, with_kwargs=True),
        layer.register_forward_hook(take, with_kwargs=True),
    ]
