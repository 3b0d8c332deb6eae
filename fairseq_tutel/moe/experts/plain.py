"""Gated experts with any function between two plain products of torch, such as a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...config import EXPERTS, Options, above, at_least, option
from .stacked import StackedExperts, ffn_layout


class PlainExperts(StackedExperts):
    """Base class of experts whose subclass gives ``activate``."""

    uses_activation = False
    # of the gate's and fc1's outputs, [..., F] each; of fc1's alone without a gate
    activate: Callable[..., Tensor]

    @dataclass(frozen=True)
    class Options(Options):
        bias: bool = option(False, "the projections have biases")

    @classmethod
    def layout_for(cls, options: Any):
        firsts = ("fc_gate", "fc1") if getattr(options, "gated", True) else ("fc1",)
        return ffn_layout(*firsts, bias=options.bias)

    def compute(self, prepared, rows, offsets):
        found = dict(zip(self.layout, prepared.params, strict=True))
        parts = len(self.layout["fc1_weight"].names)
        up, bias = found["fc1_weight"], found.get("fc1_bias")
        up = up.reshape(len(up) // parts, -1, up.shape[-1])
        bias = None if bias is None else bias.reshape(len(up), -1)
        hidden = self.activate(*self.product(rows, up, offsets, bias).chunk(parts, -1))
        after_activation, of_output = prepared.dropout
        if after_activation:
            hidden = functional.dropout(hidden, after_activation)
        out = self.product(hidden, found["fc2_weight"], offsets, found.get("fc2_bias"))
        return functional.dropout(out, of_output) if of_output else out


@EXPERTS.register("clamped_swiglu")
class ClampedSwiGLUExperts(PlainExperts):
    """gpt-oss's clamped swiglu

    It is ``fc2(g * sigmoid(alpha * g) * (u + shift))`` with g and u of fc_gate and fc1, clamped.
    """

    @dataclass(frozen=True)
    class Options(PlainExperts.Options):
        limit: float = option(7.0, "largest g, and largest magnitude of u", above(0))
        alpha: float = option(1.702, "factor inside the sigmoid; 1: silu", at_least(0))
        shift: float = option(1.0, "addend of u; 0 in DeepSeek-V4 and GLM-5")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        options: Any = self.options
        gate = gate.clamp(max=options.limit)
        up = up.clamp(-options.limit, options.limit)
        return gate * torch.sigmoid(options.alpha * gate) * (up + options.shift)

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.options}"
