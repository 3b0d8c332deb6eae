"""Networks of experts: :class:`ExpertConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import STORED_FORMATS, listed
from .options import NO_FLAG, OptionError, Range, at_least, check_options, documented, option
from .registry import EXPERTS, Options

_PROBABILITY = Range(0, 1, high_open=True)


@documented
@dataclass(frozen=True)
class ExpertConfig:
    """Networks of a layer's experts.

    ``MoELayer(activation="relu")`` is short for
    ``MoELayer(experts=ExpertConfig(activation="relu"))``.
    """

    expert_network: str = option(
        "ffn",
        "network of an expert; gated ones ignore the model's activation",
        registry=EXPERTS,
        options="expert_options",
    )
    activation: str = option(
        "gelu", "activation of ffn and of the shared expert: gelu, relu, swish, ...", flag=NO_FLAG
    )
    dropout: float = option(0.0, "dropout of the experts' outputs", _PROBABILITY, flag=NO_FLAG)
    activation_dropout: float = option(
        0.0, "dropout after the experts' activation", _PROBABILITY, flag=NO_FLAG
    )
    expert_storage: str = option(
        "stacked",
        "how the weights are held: 'stacked': for training; 'mapped', 'bf16' or 'int8': for "
        "evaluation, empty until a state dict is loaded",
        choices=("stacked", "mapped", "bf16", "int8"),
        flag=NO_FLAG,
    )
    expert_compute: str = option(
        "same",
        "precision of the experts' products in the forward pass: 'same', or 'fp8' (e4m3; Hopper "
        "and newer, emulated on CPUs)",
        choices=("same", "fp8"),
    )
    activation_memory: str = option(
        "fast",
        "what experts keep for the backward pass: 'fast': all; 'lean': values before the "
        "activation, half; 'minimal': tokens and routing",
        choices=("fast", "lean", "minimal"),
    )
    activation_storage: str = option(
        "same",
        f"format of what 'lean' keeps: {listed(STORED_FORMATS)}",
        choices=tuple(STORED_FORMATS),
        needs=["activation_memory=lean"],
    )
    shared_expert_dim: int = option(
        0,
        "> 0: hidden dimension of a dense expert for every token",
        at_least(0),
        flag="--moe-shared-expert-ffn-dim",
    )
    shared_expert_gate: bool = option(
        False,
        "multiply the shared expert's output by a sigmoid gate of the token (Qwen1.5-MoE)",
        needs=["shared_expert_dim"],
    )
    expert_options: Options | Mapping[str, Any] | None = option(
        None, "the network's own options, by name or as an object of its class ``Options``"
    )

    def __post_init__(self):
        check_options(self)
        if self.expert_storage != "stacked" and self.expert_compute != "same":
            raise OptionError(
                f"`expert_compute={self.expert_compute!r}`: "
                f"`expert_storage={self.expert_storage!r}` has its own"
            )
        reads = EXPERTS.get(self.expert_network).uses_activation or self.shared_expert_dim
        if self.activation != type(self).activation and not reads:
            raise OptionError(
                f"`activation={self.activation!r}`: {self.expert_network!r} has its own"
            )
