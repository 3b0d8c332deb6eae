"""Gated experts: what one projection of a token activates gates another (arXiv 2002.05202).

``fc_gate`` is the projection that is activated (``w1`` in Mixtral, ``gate_proj`` in Llama), ``fc1``
the one that it gates (``w3``, ``up_proj``), ``fc2`` leads back (``w2``, ``down_proj``): fc1 and fc2
stay what they are in a network without a gate, and a gate is added. Gate and fc1 of an expert are
neighbours in memory, [gate; fc1], so that both are one product.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...config import EXPERTS, Options, option
from .ffn import Experts
from .stacked import Stacked


class _GatedExperts(Experts):
    gated_by: str
    uses_activation = False

    @dataclass(frozen=True)
    class Options(Options):
        bias: bool = option(False, "the three projections have biases")

    layout = {
        "fc1_weight": Stacked("FM", "fc_gate.weight", "fc1.weight"),
        "fc1_bias": Stacked("F", "fc_gate.bias", "fc1.bias"),
        "fc2_weight": Stacked("MF", "fc2.weight"),
        "fc2_bias": Stacked("M", "fc2.bias"),
    }

    @classmethod
    def layout_for(cls, options):
        return {
            name: stacked
            for name, stacked in cls.layout.items()
            if options.bias or not name.endswith("bias")
        }

    def _options(self, call):
        return ops.FFNOptions(self.gated_by, call.dropout, call.part)

    def _tensors(self, call):
        """Gate and fc1 as one layer: [e, 2F, M] and [e, 2F]; None for a bias that is not there."""
        found = dict(zip(self.layout, call.params, strict=True))
        for name in ("fc1_weight", "fc1_bias"):
            if name in found:
                halves, hidden_dim, *inputs = found[name].shape
                found[name] = found[name].reshape(halves // 2, 2 * hidden_dim, *inputs)
        return tuple(found.get(name) for name in _GatedExperts.layout)

    def _gradients(self, call, found):
        there = [each for each in found if each is not None]
        return tuple(d.view(p.shape) for d, p in zip(there, call.params, strict=True))

    def extra_repr(self):
        return f"{super(Experts, self).extra_repr()}, bias={self.options.bias}"


@EXPERTS.register("swiglu")
class SwiGLUExperts(_GatedExperts):
    """fc2(silu(fc_gate(x)) * fc1(x)), as in Mixtral and DeepSeekMoE"""

    gated_by = "swiglu"


@EXPERTS.register("geglu")
class GeGLUExperts(_GatedExperts):
    """fc2(gelu(fc_gate(x)) * fc1(x)), with the exact (erf) gelu"""

    gated_by = "geglu"
