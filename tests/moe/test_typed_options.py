"""Keyword arguments as editors see them: the fields of MoEConfig, the arguments of MoELayer."""

import dataclasses
import inspect
import subprocess
import sys

import fairseq_tutel
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


PROGRAM = """
import sys
import fairseq_tutel
assert "torch" not in sys.modules and "fairseq_tutel.moe" not in sys.modules
assert {"MoELayer", "replace_ffn", "register"} <= set(dir(fairseq_tutel))
from fairseq_tutel import MoELayer, replace_ffn
import fairseq_tutel.moe as moe
assert MoELayer is moe.MoELayer and replace_ffn is moe.replace_ffn
assert "fairseq" not in sys.modules and not hasattr(fairseq_tutel, "MoELayers")
"""


def test_the_package_offers_the_layer_and_imports_it_when_asked():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    assert set(fairseq_tutel.__all__) <= set(dir(fairseq_tutel))
