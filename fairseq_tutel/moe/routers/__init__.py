"""Routers by name: ``--moe-router``, ``MoELayer(router=...)``. One file each; see base.py."""

from __future__ import annotations

from ...config import ROUTERS, MoEConfig
from ...registry import Options, option
from .base import Router, TopKRouter, route_by_module
from .cosine import CosineRouter
from .linear import LinearRouter
from .steps import route_logits

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
    "make_router",
    "option",
    "register_router",
    "route_by_module",
    "route_logits",
]
