"""Keyword arguments as editors see them: the fields of configs, the arguments of MoELayer."""

import dataclasses
import inspect

from fairseq_tutel.config import ExpertConfig, MoEConfig
from fairseq_tutel.moe import MoELayer, replace_ffn
from fairseq_tutel.moe.typed_options import (
    BlockOptions,
    ExpertOptions,
    LayerOptions,
    RoutingOptions,
)


def types_of(options):
    return {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}


def fields_of(config):
    return {field.name: field.type for field in dataclasses.fields(config)}


def test_single_options_are_the_fields_of_the_configs():
    routing, experts = fields_of(MoEConfig), fields_of(ExpertConfig)
    assert routing.pop("num_experts") == "int"
    assert types_of(RoutingOptions) == routing
    assert types_of(ExpertOptions) == {**experts, "expert_fn": "Callable[[], nn.Module] | None"}
    assert types_of(LayerOptions) == {**types_of(RoutingOptions), **types_of(ExpertOptions)}
    options = inspect.signature(MoELayer).parameters["options"]
    assert options.annotation == "Unpack[LayerOptions]"


def test_options_of_a_replaced_block_are_the_arguments_of_the_layer():
    arguments = {
        name: each.annotation
        for name, each in inspect.signature(MoELayer).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    }
    own = inspect.signature(replace_ffn).parameters
    assert own["moe"].annotation == "Unpack[BlockOptions]"
    for name in ("model_dim", "num_experts", "groups", "seed"):
        assert name == "model_dim" or name in own
        del arguments[name]
    assert types_of(BlockOptions) == {**arguments, **types_of(LayerOptions)}
