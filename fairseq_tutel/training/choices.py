"""Record which experts a model's tokens go to, and route another pass by the record."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..moe import MoELayer
from ..moe.model import moe_layers
from ..moe.requests import LayerCall, Request, open_requests


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
    layers = moe_layers(model).items()
    asked = {
        layer: Request({"recorder": None}, _recorder(found, name, layer)) for name, layer in layers
    }
    with open_requests(asked):
        yield found


def _recorder(found: dict[str, torch.Tensor], name: str, layer: MoELayer):
    small = torch.int16 if layer.config.num_outputs < 2**15 - 1 else torch.int32

    def record(call: LayerCall, _: object) -> None:
        if name in found:
            raise RuntimeError(
                f"layer {name!r} is called twice: use one record_choices() for each forward pass"
            )
        assert call.choices is not None  # the request asked for them
        found[name] = call.choices.to(small)

    return record


@contextmanager
def replay_choices(model: nn.Module, choices: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Route a forward pass by recorded choices, and its recomputations by activation checkpointing.

    Weights come from the model's gates.

    Args:
        model (nn.Module): the model, wrapped or not.
        choices (dict): the result of :func:`record_choices`, on any device. Layers that it lacks
            choose by themselves.

    Raises:
        ValueError: the model lacks a layer that ``choices`` has.
        RuntimeError: a layer that ``choices`` has was not called in the block.
    """
    layers = moe_layers(model)
    if unknown := [name for name in choices if name not in layers]:
        raise ValueError(f"choices has {unknown}, the model's MoE layers are {list(layers)}")
    left = dict(choices)
    asked = {
        layers[name]: Request({"choices": given}, lambda *_, name=name: left.pop(name, None))
        for name, given in choices.items()
    }
    with open_requests(asked):
        yield
    if left:
        raise RuntimeError(
            f"replay_choices has choices for the layers {list(left)}, which were not called: call "
            "them inside the block, or leave out their choices"
        )
