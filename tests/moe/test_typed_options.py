"""Keyword arguments as editors see them: the fields of configs, the arguments of MoELayer."""

import dataclasses
import inspect

from fairseq_tutel.config import ExpertConfig, MoEConfig
from fairseq_tutel.moe import MoELayer, replace_ffn
from fairseq_tutel.moe import typed_options as typed


def types_of(options):
    return {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}


def test_options_are_the_fields_of_the_configs_and_the_arguments_of_the_layer():
    routing, experts = (
        {field.name: field.type for field in dataclasses.fields(config)}
        for config in (MoEConfig, ExpertConfig)
    )
    assert routing.pop("num_experts") == "int"
    assert types_of(typed.RoutingOptions) == routing
    experts["expert_fn"] = "Callable[[], nn.Module] | None"
    assert types_of(typed.ExpertOptions) == experts
    assert types_of(typed.LayerOptions) == routing | experts
    arguments = inspect.signature(MoELayer).parameters
    annotations = {name: each.annotation for name, each in arguments.items()}
    assert annotations.pop("options") == "Unpack[LayerOptions]"
    own = inspect.signature(replace_ffn).parameters
    assert own["moe"].annotation == "Unpack[BlockOptions]"
    for name in ("model_dim", "num_experts", "groups", "seed"):
        assert name == "model_dim" or name in own
        del annotations[name]
    assert types_of(typed.BlockOptions) == annotations | routing | experts
