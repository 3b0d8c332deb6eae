"""Weights of transformers' experts, in one form for all layouts, and their network.

Since version 5 a module holds the matrices of all experts: ``gate_up_proj`` (or ``up_proj``
without a gate), ``down_proj``, and biases ``*_bias``. Attributes of the module say the layout:
``is_transposed`` and ``is_concatenated`` (else the rows of gate and up take turns).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...config import Options, option
from ...moe.experts import PlainExperts
from ...moe.replace.recognize import GATED


class Projections(NamedTuple):
    """Matrices and biases of an experts module, all experts in one tensor."""

    up: Tensor  # [E, 2F, M], gate and up in the module's order, or [E, F, M] without a gate
    down: Tensor  # [E, M, F]
    up_bias: Tensor | None  # [E, 2F] or [E, F]
    down_bias: Tensor | None  # [E, M]
    gated: bool
    interleaved: bool  # the rows of gate and up take turns

    @classmethod
    def of(
        cls, where: str, experts: nn.Module, params: Mapping[str, Tensor] | None = None
    ) -> Projections:
        """Read a module, or ``params`` by the same names; ValueErrors begin with ``where``."""
        params = dict(experts.named_parameters()) if params is None else params
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        first = "gate_up_proj" if "gate_up_proj" in params else "up_proj"
        names = {first, "down_proj"}
        biases = {f"{name}_bias" for name in names}
        if set(params) not in (names, names | biases):
            raise ValueError(
                f"{where} has {shapes}, not experts.gate_up_proj (or up_proj) and down_proj"
            )
        up, down = params[first], params["down_proj"]
        gated = first == "gate_up_proj"
        if getattr(experts, "is_transposed", False):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        num_experts, model_dim, hidden_dim = down.shape if down.dim() == 3 else (0, 0, 0)
        if up.shape != (num_experts, (1 + gated) * hidden_dim, model_dim):
            raise ValueError(f"{where}: shapes do not fit, {shapes}")
        interleaved = gated and not getattr(experts, "is_concatenated", True)
        both = params.get(f"{first}_bias"), params.get("down_proj_bias")
        return cls(up, down, *both, gated, interleaved)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, M and F."""
        num_experts, model_dim, hidden_dim = self.down.shape
        return num_experts, model_dim, hidden_dim

    def views(self) -> dict[str, Tensor]:
        """Return views of the module's parameters by the names of one expert's tensors here.

        ``fc_gate.weight`` and ``fc1.weight`` are [E, F, M], ``fc2.weight`` is [E, M, F], biases are
        [E, F] and [E, M]; there is no ``fc_gate`` without a gate.
        """
        found = {}
        for end, up, down in (
            ("weight", self.up, self.down),
            ("bias", self.up_bias, self.down_bias),
        ):
            if up is None or down is None:
                continue
            up, found[f"fc2.{end}"] = up.detach(), down.detach()
            if self.interleaved:
                found |= {f"fc_gate.{end}": up[:, ::2], f"fc1.{end}": up[:, 1::2]}
            elif self.gated:
                found |= dict(zip((f"fc_gate.{end}", f"fc1.{end}"), up.chunk(2, 1), strict=True))
            else:
                found[f"fc1.{end}"] = up
        return found


class Activation:
    """Function of the hidden values of transformers' experts: [R, F] twice, or once without a gate.

    It calls the module's own ``_apply_gate`` or ``act_fn``.
    """

    def __init__(self, experts: nn.Module, projections: Projections):
        self.experts = experts
        self.gated, self.interleaved = projections.gated, projections.interleaved

    def __call__(self, *parts: Tensor) -> Tensor:
        both = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return self.of_hidden(both)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Apply it to the output of the first projection, [R, 2F] or [R, F], in its own order."""
        if not self.gated:
            return self.experts.act_fn(hidden)
        if hasattr(self.experts, "_apply_gate"):
            return self.experts._apply_gate(hidden)
        gate, up = hidden.chunk(2, -1)
        return self.experts.act_fn(gate) * up

    @torch.no_grad()
    def built_in(self) -> str | None:
        """Return the gated network with this activation, recognised by values; None if none is."""
        if not self.gated:
            return None
        generator = torch.Generator().manual_seed(0)
        # small and large values: limits may lie far from 0
        gate, up = torch.randn(2, 6, 64, generator=generator) * 10.0 ** torch.arange(6)[:, None]
        found = self(gate, up)
        for network, known in GATED.items():
            if torch.allclose(found, known(gate) * up, rtol=1e-5, atol=1e-5):
                return network
        return None


class KeptExperts(PlainExperts):
    """Experts with the activation of the model's own."""

    @dataclass(frozen=True)
    class Options(Options):
        gated: bool = option(True, "a second projection is activated and multiplies the first")
        bias: bool = option(False, "the projections have biases")
