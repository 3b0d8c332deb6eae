"""What a router is: tokens in, a routing and its auxiliary values out.

A router is one file: a subclass of :class:`Router` (or of :class:`TopKRouter`, if only its logits
are its own), its options, and a name::

    from dataclasses import dataclass

    from torch import nn

    from fairseq_tutel.moe.routers import Options, TopKRouter, above, option, register_router

    @register_router("mine")
    class MyRouter(TopKRouter):
        \"\"\"One line for the help text of --moe-router.\"\"\"

        @dataclass(frozen=True)
        class Options(Options):
            scale: float = option(1.0, "what the logits are multiplied by", above(0))

        def __init__(self, model_dim, config):
            super().__init__(model_dim, config)
            self.wg = nn.Linear(model_dim, config.num_outputs, bias=False)

        def logits(self, x_TM):
            logits_TE = nn.functional.linear(x_TM.float(), self.wg.weight.float())
            return self.options.scale * logits_TE

That is all: ``MoELayer(..., router="mine", router_options={"scale": 2.0})``, ``--moe-router mine
--moe-mine-scale 2``, ``model.moe_mine_scale`` of a Hydra config, the planner and checkpoints have
it once the file has been imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from ...config import MoEConfig, Options
from ..load_bias import UpdateWatch, quantile_bias, sign_bias
from ..reports import RouterAux
from ..routing import RouterCall, Routing
from ..torch_modes import without_autocast
from .from_logits import jitter_tokens, route_logits

logger = logging.getLogger(__name__)


class Router(nn.Module):
    """Base class of routers; a layer holds its router as ``gate``, Meta's name for it.

    Parameters and buffers are the same on all ranks. Buffers keep their dtype when a model is made
    half, and their initial value where a checkpoint lacks them. One is ``load_bias``, fp32 [E + N]
    (N null experts), with that option; a router hands it to :func:`route_logits`.
    """

    Options: ClassVar[type[Options]] = Options

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__()
        self.model_dim = model_dim
        self.config = config
        self.options = config.router_options
        biased = config.load_bias != "none"
        # fp32 under any default dtype: the steps of a bias are too small for half precision
        bias_E = torch.zeros(config.num_outputs, dtype=torch.float32) if biased else None
        self.register_buffer("load_bias", bias_E)
        self._watch = UpdateWatch()

    def forward(
        self, x_TM: torch.Tensor, pad_mask_T: torch.Tensor | None, call: RouterCall
    ) -> tuple[Routing, RouterAux | None]:
        """Route the tokens [T, M] that experts will see; T may be 0 and differ between ranks.

        Args:
            pad_mask_T: bool [T], True for padding, which chooses no expert; None: none is.
            call: its options, not ``self.config``, count; auxiliary values may be None where its
                ``reports`` is False.
        """
        raise NotImplementedError

    @torch.no_grad()
    def update_load_bias(
        self, counts: torch.Tensor, held_back_E: torch.Tensor | None = None
    ) -> None:
        """Move the bias on the selection (:mod:`..load_bias`) by an update's ``bias_counts``,
        summed over its forward passes and all ranks.

        ``held_back_E``: fp32 [E + N], the bias that experts get which a growth holds back; nan of
        the others, among which alone the load is then balanced.
        """
        moves_E = slice(None)
        if held_back_E is not None:
            held_back_E = held_back_E.to(self.load_bias.device)
            moves_E = held_back_E.isnan()
        bias_E, counts = self.load_bias[moves_E], counts[moves_E]
        if self.config.load_bias == "sign":
            moved_E = sign_bias(bias_E, counts, self.config.load_bias_rate)
        else:
            moved_E = quantile_bias(bias_E, counts)
        if held_back_E is not None:
            self.load_bias.copy_(held_back_E)
        self.load_bias[moves_E] = moved_E.to(self.load_bias.dtype)

    def check_updates(self) -> None:
        """Warn, once, where training goes on and :meth:`update_load_bias` is not called."""
        weight = next(self.parameters(), None)
        if weight is not None and self.load_bias is not None and self.training:
            self._watch.look(weight, self.load_bias)

    def _apply(self, fn, recurse=True):
        before = {name: b for name, b in self.named_buffers() if b.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            owner, _, leaf = name.rpartition(".")
            moved = self.get_submodule(owner)._buffers[leaf]
            # rounding would lose what a small step adds
            if torch.finfo(moved.dtype).bits < torch.finfo(buffer.dtype).bits:
                self.get_submodule(owner)._buffers[leaf] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, own_missing, unexpected_keys, error_msgs
        )
        if self.load_bias is None and f"{prefix}load_bias" in state_dict:
            error_msgs.append(
                f"the weights have {prefix}load_bias: they were trained with a load bias, and "
                "route otherwise without; give --moe-load-bias (load_bias=) as then"
            )
        buffers = {prefix + name for name in self._buffers}
        for key in own_missing:
            if key in buffers:
                logger.warning("the checkpoint has no %s: it starts with its initial value", key)
            else:
                missing_keys.append(key)


class TopKRouter(Router):
    """A router of which only the logits are its own: softmax, the K best, Meta's balance loss."""

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> fp32 [T, E + N] (fp64 stays fp64), N null experts after the E others; runs
        with autocast switched off.
        """
        raise NotImplementedError

    def forward(
        self, x_TM: torch.Tensor, pad_mask_T: torch.Tensor | None, call: RouterCall
    ) -> tuple[Routing, RouterAux | None]:
        with without_autocast(x_TM.device):
            logits_TE = self.logits(jitter_tokens(x_TM, call))
            return route_logits(logits_TE, call, pad_mask_T, self.load_bias)


def route_of(gate: nn.Module) -> Callable[..., tuple[Routing, RouterAux | None]]:
    """How a gate routes: ``route(gate, given_TM, x_TM, pad_mask_T, call)``.

    ``given_TM`` are the tokens as the layer got them, ``x_TM`` as the experts will.
    """
    return _by_router if isinstance(gate, Router) else _by_module


def _by_router(gate, given_TM, x_TM, pad_mask_T, call):
    return gate(x_TM, pad_mask_T, call)


def _by_module(gate, given_TM, x_TM, pad_mask_T, call):
    logits_TE = gate(jitter_tokens(given_TM, call))  # under the caller's autocast
    with without_autocast(given_TM.device):
        return route_logits(logits_TE, call, pad_mask_T)
