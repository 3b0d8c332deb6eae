"""Routers by name: ``--moe-router``, ``MoELayer(router=...)``. One file each; see base.py."""

from __future__ import annotations

from ...config import ROUTERS, MoEConfig, Options, above, at_least, option
from .base import Router, TopKRouter, route_of
from .cosine import CosineRouter
from .from_logits import route_logits
from .linear import LinearRouter

register_router = ROUTERS.register


def make_router(model_dim: int, config: MoEConfig) -> Router:
    """The router that ``config`` asks for."""
    return ROUTERS.get(config.router)(model_dim, config)


__all__ = [
    "CosineRouter",
    "LinearRouter",
    "Options",
    "Router",
    "TopKRouter",
    "above",
    "at_least",
    "make_router",
    "option",
    "register_router",
    "route_logits",
    "route_of",
]
