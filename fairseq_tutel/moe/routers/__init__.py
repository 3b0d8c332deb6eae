"""Routers by name: ``--moe-router``, ``MoELayer(router=...)``; one file each, see base.py."""

from ...config import ROUTERS, MoEConfig, Options, above, at_least, option
from ..torch_modes import call_in
from .base import Router, TopKRouter, jitter_tokens
from .cosine import CosineRouter
from .from_logits import route_logits
from .linear import LinearRouter

register_router = ROUTERS.register


def make_router(model_dim: int, config: MoEConfig) -> Router:
    """Return the router that ``config`` names."""
    return ROUTERS.get(config.router)(model_dim, config)


__all__ = [
    "CosineRouter",
    "LinearRouter",
    "Options",
    "Router",
    "TopKRouter",
    "above",
    "at_least",
    "call_in",
    "jitter_tokens",
    "make_router",
    "option",
    "register_router",
    "route_logits",
]
