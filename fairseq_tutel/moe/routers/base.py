"""Base classes of routers: tokens in, a routing and its auxiliary values out.

A router is one file: a subclass of :class:`Router` (or of :class:`TopKRouter`, if only its logits
are its own), its options, and a name::

    from dataclasses import dataclass

    import torch
    from torch import nn

    from fairseq_tutel.config import above, option
    from fairseq_tutel.moe.routers import Options, TopKRouter, call_in, register_router

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
            dtype = torch.promote_types(x_TM.dtype, torch.float32)  # at least fp32
            return self.options.scale * call_in(self.wg, x_TM, dtype)

That is all: ``MoELayer(..., router="mine", router_options={"scale": 2.0})``, ``--moe-router mine
--moe-mine-scale 2``, ``model.moe_mine_scale`` of a Hydra config, the planner and checkpoints have
it once the file has been imported.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import nn

from ...config import MoEConfig, Options
from ..load_bias import UpdateWatch, quantile_bias, sign_bias
from ..reports import RouterAux
from ..routing import RouterCall, Routing
from ..torch_modes import without_autocast
from .from_logits import route_logits

logger = logging.getLogger(__name__)


class Router(nn.Module):
    """Base class of routers; a layer holds its router as ``gate``, Meta's name for it.

    Parameters and buffers are the same on all ranks. Buffers keep their dtype if a model is made
    half, and their initial value if a checkpoint lacks them. The buffer ``load_bias`` of that
    option, fp32 [E] with null experts, is an argument of :func:`route_logits`.
    """

    Options: ClassVar[type[Options]] = Options
    load_bias: torch.Tensor | None

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__()
        self.model_dim = model_dim
        self.config = config
        self.options: Any = config.router_options  # an instance of the router's Options
        biased = config.load_bias != "none"
        # fp32 under any default dtype: the steps of a bias are too small for half precision
        bias_E = torch.zeros(config.num_outputs, dtype=torch.float32) if biased else None
        self.register_buffer("load_bias", bias_E)
        self._watch = UpdateWatch()

    def forward(
        self, x_TM: torch.Tensor, pad_mask_T: torch.Tensor | None, call: RouterCall
    ) -> tuple[Routing, RouterAux | None]:
        """Return the routing of tokens, and auxiliary values, or None if not ``call.reports``.

        ``x_TM`` has the dtype of the experts; T may be 0 and differ between ranks. ``pad_mask_T``,
        bool, is True for padding, which chooses no expert; None: no padding. ``call`` has the
        options of the call, used in place of ``self.config``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def update_load_bias(self, counts: torch.Tensor) -> None:
        """Move the bias on the selection of experts (:mod:`..load_bias`).

        ``counts`` are an update's ``bias_counts``, summed over its forward passes and all ranks.
        """
        bias_E = self.load_bias
        if bias_E is None or not self.config.moves_load_bias:
            raise ValueError(
                f"load_bias={self.config.load_bias!r} does not move: give 'sign' or 'quantile'"
            )
        if self.config.load_bias == "sign":
            moved_E = sign_bias(bias_E, counts, self.config.load_bias_rate)
        else:
            moved_E = quantile_bias(bias_E, counts)
        # without counts no pass called the layer
        bias_E.copy_(torch.where(counts.any(), moved_E.to(bias_E.dtype), bias_E))

    def check_updates(self) -> None:
        """Warn once if training goes on without calls of :meth:`update_load_bias`."""
        weight = next(self.parameters(), None)
        if weight is not None and self.load_bias is not None and self.training:
            self._watch.look(weight, self.load_bias)

    def _apply(self, fn, recurse=True):
        before = {name: b for name, b in self.named_buffers() if b.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            owner, _, leaf = name.rpartition(".")
            moved = self.get_buffer(name)
            # rounding would lose small steps
            if torch.finfo(moved.dtype).bits < torch.finfo(buffer.dtype).bits:
                setattr(self.get_submodule(owner), leaf, buffer.to(moved.device))
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


def jitter_tokens(x_TM: torch.Tensor, call: RouterCall) -> torch.Tensor:
    """Multiply by uniform(1-j, 1+j) in training (Switch Transformer, section 2.2)."""
    jitter = call.config.input_jitter
    if not call.training or jitter == 0:
        return x_TM
    return x_TM * torch.empty_like(x_TM).uniform_(1 - jitter, 1 + jitter)


class TopKRouter(Router):
    """Base class of routers that give logits: softmax, the K best experts, Meta's balance loss."""

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens [T, M], fp32 [T, E], or fp64 for fp64; null experts last.

        Runs with autocast switched off.
        """
        raise NotImplementedError

    def logits_and_tokens(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return :meth:`logits`, and the tokens to dispatch (:class:`..Routing`) or None."""
        return self.logits(x_TM), None

    def forward(
        self, x_TM: torch.Tensor, pad_mask_T: torch.Tensor | None, call: RouterCall
    ) -> tuple[Routing, RouterAux | None]:
        seen_TM = jitter_tokens(x_TM, call)
        with without_autocast(x_TM.device):
            logits_TE, tokens_TM = self.logits_and_tokens(seen_TM)
            routing, aux = route_logits(logits_TE, call, pad_mask_T, self.load_bias)
        if tokens_TM is not None and seen_TM is x_TM:
            routing = routing._replace(tokens_TM=tokens_TM)
        return routing, aux
