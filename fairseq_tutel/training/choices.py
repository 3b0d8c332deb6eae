"""Record which experts a model's tokens go to, and route another pass by the record."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..moe import MoELayer
from ..moe.model import moe_layers
from ..moe.torch_modes import in_backward


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Record the choices of a model's MoE layers in a forward pass.

    STEERING.md has an example. Each rank records its own tokens. A pass that activation
    checkpointing recomputes is not recorded again.

    Args:
        model (nn.Module): the model, wrapped or not. No layer is called twice (RuntimeError).

    Yields:
        dict: choices [..., K] by layer name, int16 (int32 from 32767 experts) on the layer's
        device; :mod:`fairseq_tutel.moe.given_choices` explains negative numbers.
    """
    found: dict[str, torch.Tensor] = {}
    layers = moe_layers(model)
    before = {name: layer.recorders for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.recorders = (*layer.recorders, _recorder(found, name, layer))
    try:
        yield found
    finally:
        for name, layer in layers.items():
            layer.recorders = before[name]


def _recorder(found: dict[str, torch.Tensor], name: str, layer: MoELayer):
    small = torch.int16 if layer.config.num_outputs < 2**15 - 1 else torch.int32

    def record(choices: torch.Tensor) -> None:
        if in_backward():
            return
        if name in found:
            raise RuntimeError(
                f"layer {name!r} is called twice: use one record_choices() for each forward pass"
            )
        found[name] = choices.to(small)

    return record


@contextmanager
def replay_choices(model: nn.Module, choices: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Route a forward pass by recorded choices, and its recomputations by activation checkpointing.

    Weights come from the model's gates.

    Args:
        model (nn.Module): the model, wrapped or not.
        choices (dict): the result of :func:`record_choices`, on any device. Layers that it lacks
            choose by themselves; ValueError for layers that the model lacks.
    """
    layers = moe_layers(model)
    if unknown := [name for name in choices if name not in layers]:
        raise ValueError(f"choices has {unknown}, the model's MoE layers are {list(layers)}")
    state = {"open": True}
    for name, given in choices.items():
        _replay(layers[name], given, state)
    try:
        yield
    finally:
        state["open"] = False


def _replay(layer: MoELayer, given: torch.Tensor, state: Mapping[str, bool]) -> None:
    """Give a layer these choices until its first forward pass after the block."""

    def give(module, args, kwargs):
        if not (state["open"] or in_backward()):
            handle.remove()
            return None
        device = next(module.parameters()).device
        return args, {"choices": given.to(device), **kwargs}

    handle = layer.register_forward_pre_hook(give, with_kwargs=True)
