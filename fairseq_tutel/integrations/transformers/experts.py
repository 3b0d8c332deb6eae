"""Weights of transformers' experts, in one form for all layouts, and their network.

Since version 5 a module holds the matrices of all experts: ``gate_up_proj`` (or ``up_proj``
without a gate), ``down_proj``, and biases ``*_bias``. Attributes of the module say the layout:
``is_transposed`` and ``is_concatenated`` (else the rows of gate and up take turns).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...config import Options, option
from ...moe.experts import Stacked, StackedExperts

_GATED = {"swiglu": nn.functional.silu, "geglu": nn.functional.gelu}


class ExpertWeights(NamedTuple):
    """Views of the parameters of an experts module by the names of this package's experts.

    Writing to a view writes to the module's parameter.

    Attributes:
        views: ``fc_gate.weight`` and ``fc1.weight`` [E, F, M], ``fc2.weight`` [E, M, F], biases
            [E, F] and [E, M]; without a gate no ``fc_gate``.
        interleaved: whether the module's gate and up take turns.
    """

    views: dict[str, Tensor]
    interleaved: bool

    @classmethod
    def of(cls, where: str, experts: nn.Module) -> ExpertWeights:
        """Read a module; raise ValueError, which begins with ``where``, if it has another form."""
        params = {name: param.detach() for name, param in experts.named_parameters()}
        return cls.of_tensors(where, params, experts)

    @classmethod
    def of_tensors(cls, where: str, params: dict[str, Tensor], experts: nn.Module) -> ExpertWeights:
        """Read tensors by the names of a module's parameters; as :meth:`of` otherwise."""
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        first = "gate_up_proj" if "gate_up_proj" in params else "up_proj"
        names = {first, "down_proj"}
        biases = {f"{name}_bias" for name in names}
        if set(params) not in (names, names | biases):
            raise ValueError(
                f"{where} has {shapes}, not experts.gate_up_proj (or up_proj) and "
                "experts.down_proj, as blocks of transformers have since version 5"
            )
        up, down = params[first], params["down_proj"]
        if getattr(experts, "is_transposed", False):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        gated = first == "gate_up_proj"
        num_experts, model_dim, hidden_dim = down.shape if down.dim() == 3 else (0, 0, 0)
        if up.shape != (num_experts, (1 + gated) * hidden_dim, model_dim):
            raise ValueError(f"{where}: shapes do not fit, {shapes}")
        interleaved = gated and not getattr(experts, "is_concatenated", True)
        ends = {"weight": up} | ({"bias": params[f"{first}_bias"]} if biases <= set(params) else {})
        views = {}
        for end, both in ends.items():
            if gated and interleaved:
                views |= {f"fc_gate.{end}": both[:, ::2], f"fc1.{end}": both[:, 1::2]}
            elif gated:
                gate, other = both.chunk(2, 1)
                views |= {f"fc_gate.{end}": gate, f"fc1.{end}": other}
            else:
                views[f"fc1.{end}"] = both
            views[f"fc2.{end}"] = down if end == "weight" else params["down_proj_bias"]
        return cls(views, interleaved)

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, M and F."""
        num_experts, model_dim, hidden_dim = self.views["fc2.weight"].shape
        return num_experts, model_dim, hidden_dim

    @property
    def gated(self) -> bool:
        return "fc_gate.weight" in self.views

    @property
    def biased(self) -> bool:
        return "fc1.bias" in self.views


class Activation:
    """Function of the hidden values of transformers' experts: [R, F] twice, or once without a gate.

    It calls the module's own ``_apply_gate`` or ``act_fn``.
    """

    def __init__(self, experts: nn.Module, weights: ExpertWeights):
        self.experts, self.interleaved, self.gated = experts, weights.interleaved, weights.gated

    def __call__(self, *parts: Tensor) -> Tensor:
        if not self.gated:
            return self.experts.act_fn(parts[0])
        gate, up = parts
        if not hasattr(self.experts, "_apply_gate"):
            return self.experts.act_fn(gate) * up
        both = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return self.experts._apply_gate(both)

    @torch.no_grad()
    def built_in(self) -> str | None:
        """Return the gated network with this activation, recognised by values; None if none is."""
        if not self.gated:
            return None
        generator = torch.Generator().manual_seed(0)
        # small and large values: limits may lie far from 0
        gate, up = torch.randn(2, 6, 64, generator=generator) * 10.0 ** torch.arange(6)[:, None]
        found = self(gate, up)
        for network, known in _GATED.items():
            if torch.allclose(found, known(gate) * up, rtol=1e-5, atol=1e-5):
                return network
        return None


class KeptExperts(StackedExperts):
    """Experts with the activation of the model's own, in plain products of torch."""

    uses_activation = False
    activate: Callable[..., Tensor]

    @dataclass(frozen=True)
    class Options(Options):
        gated: bool = option(True, "a second projection is activated and multiplies the first")
        bias: bool = option(False, "the projections have biases")

    @classmethod
    def layout_for(cls, options):
        gate = ("fc_gate",) if options.gated else ()
        layout = {"fc1_weight": Stacked("FM", *(f"{each}.weight" for each in (*gate, "fc1")))}
        if options.bias:
            layout["fc1_bias"] = Stacked("F", *(f"{each}.bias" for each in (*gate, "fc1")))
        layout["fc2_weight"] = Stacked("MF", "fc2.weight")
        return layout | ({"fc2_bias": Stacked("M", "fc2.bias")} if options.bias else {})

    def compute(self, prepared, rows, offsets):
        found = dict(zip(self.layout, prepared.params, strict=True))
        parts = 2 if self.options.gated else 1
        weight, bias = found["fc1_weight"], found.get("fc1_bias")
        weight = weight.reshape(len(weight) // parts, -1, weight.shape[-1])
        hidden = self._linear(
            rows, weight, bias if bias is None else bias.view(len(weight), -1), offsets
        )
        hidden = self.activate(*hidden.chunk(parts, -1))
        return self._linear(hidden, found["fc2_weight"], found.get("fc2_bias"), offsets)

    def _linear(self, rows, weight, bias, offsets):
        out = self.product(rows, weight, offsets)
        if bias is None:
            return out
        if offsets is None:
            return out + bias[:, None]
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        tail = rows.new_zeros((len(rows) - int(offsets[-1]), bias.shape[1]))
        return out + torch.cat([bias.repeat_interleave(counts, 0), tail])
