"""Gated experts: one projection of a token is activated and multiplies another.

GLU variants, arXiv 2002.05202. ``fc_gate`` is the projection that is activated (``w1`` in Mixtral,
``gate_proj`` in Llama), ``fc1`` the other one (``w3``, ``up_proj``), ``fc2`` the projection back
(``w2``, ``down_proj``). fc1 and fc2 are thus the same as in a network without a gate. The gate and
fc1 of an expert are neighbours in memory, [gate; fc1], so that both are one product.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...config import EXPERTS, Options, option
from .ffn import Experts
from .network import FusedNetwork
from .stacked import StackedExperts, ffn_layout


class _GatedExperts(Experts):
    """Base class; a subclass names the gate."""

    gated_by: str
    uses_activation = False

    @dataclass(frozen=True)
    class Options(Options):
        bias: bool = option(False, "the projections have biases")

    layout = ffn_layout("fc_gate", "fc1")

    @classmethod
    def layout_for(cls, options):
        return ffn_layout("fc_gate", "fc1", bias=options.bias)

    def _fused(self, dropout, part):
        options = ops.FFNOptions(self.gated_by, dropout, part, self.fp8)
        return FusedNetwork(options, parts=2, has_bias=self.options.bias)

    def extra_repr(self):
        return f"{StackedExperts.extra_repr(self)}, bias={self.options.bias}"


@EXPERTS.register("swiglu")
class SwiGLUExperts(_GatedExperts):
    """fc2(silu(fc_gate(x)) * fc1(x)) (Mixtral)"""

    gated_by = "swiglu"


@EXPERTS.register("geglu")
class GeGLUExperts(_GatedExperts):
    """fc2(gelu(fc_gate(x)) * fc1(x)), exact gelu"""

    gated_by = "geglu"
