"""Routers by name: ``--moe-router``, ``MoELayer(router=...)``. One file each; see base.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...config import ROUTERS, MoEConfig
from ...registry import Options, option
from .base import Router, TopKRouter, route_by_module
from .cosine import CosineRouter
from .linear import LinearRouter
from .steps import route_logits

register_router = ROUTERS.register


@dataclass(frozen=True)
class RouterState:
    """What a router adds to a model, known without building it on a device.

    Attributes:
        parameters: name -> shape, under ``gate.`` of every layer.
        buffers: persistent ones, the same on all ranks; checkpoints keep them in the shared file.
    """

    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]

    @property
    def num_parameters(self) -> int:
        """Parameters of one layer's router."""
        return sum(torch.Size(shape).numel() for shape in self.parameters.values())


def make_router(model_dim: int, config: MoEConfig) -> Router:
    """The router that ``config`` asks for."""
    return ROUTERS.get(config.router)(model_dim, config)


def describe_router(model_dim: int, config: MoEConfig) -> RouterState:
    """Shapes of the parameters and buffers of a router; takes no memory."""
    with torch.device("meta"):
        router = make_router(model_dim, config)
    parameters = {name: tuple(param.shape) for name, param in router.named_parameters()}
    state = {name: tuple(value.shape) for name, value in router.state_dict().items()}
    buffers = {name: shape for name, shape in state.items() if name not in parameters}
    return RouterState(parameters, buffers)


__all__ = [
    "CosineRouter",
    "LinearRouter",
    "Options",
    "Router",
    "RouterState",
    "TopKRouter",
    "describe_router",
    "make_router",
    "option",
    "register_router",
    "route_by_module",
    "route_logits",
]
