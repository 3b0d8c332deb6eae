"""Keyword arguments as editors see them: the fields of MoEConfig, the arguments of MoELayer."""

import dataclasses
import inspect

from fairseq_tutel.config import MoEConfig
from fairseq_tutel.moe import MoELayer, replace_ffn
from fairseq_tutel.moe.typed_options import LayerOptions, RoutingOptions


def types_of(options):
    return {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}


def test_options_of_routing_are_the_fields_of_the_config():
    fields = {field.name: field.type for field in dataclasses.fields(MoEConfig)}
    assert fields.pop("num_experts") == "int"
    assert types_of(RoutingOptions) == fields
    routing = inspect.signature(MoELayer).parameters["routing"]
    assert routing.annotation == "Unpack[RoutingOptions]"


def test_options_of_a_replaced_block_are_the_arguments_of_the_layer():
    arguments = {
        name: each.annotation
        for name, each in inspect.signature(MoELayer).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    }
    own = inspect.signature(replace_ffn).parameters
    assert own["moe"].annotation == "Unpack[LayerOptions]"
    for name in ("model_dim", "num_experts", "groups", "seed"):
        assert name == "model_dim" or name in own
        del arguments[name]
    assert types_of(LayerOptions) == {**arguments, **types_of(RoutingOptions)}
