"""What replace_moe refuses, and in which words; nothing is changed then."""

import copy

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.sparse_models import MIXTRAL, SIZES, make, tokens, transformers
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import (
    original_state_dict,
    replace_moe,
    restore_moe,
)

pytestmark = pytest.mark.extras


def shared():
    return make("Qwen2Moe", num_experts=4, moe_intermediate_size=24, decoder_sparse_step=1,
                shared_expert_intermediate_size=24)  # fmt: skip


def grouped():
    config = transformers.DeepseekV3Config(
        hidden_size=24, n_routed_experts=4, n_group=2, topk_group=1, moe_intermediate_size=24,
        num_experts_per_tok=2,
    )  # fmt: skip
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    block = module.DeepseekV3MoE(config)
    del block.shared_experts
    return nn.ModuleDict({"mlp": block})


def quantised():
    model = make("mixtral")
    model.hf_quantizer = type("Quantizer", (), {})()
    model.hf_quantizer.quantization_config = type("Config", (), {"quant_method": "fp8"})()
    return model


def on_meta():
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **MIXTRAL))


def twice():
    model = make("mixtral")
    replace_moe(model)
    return model


def two_dtypes():
    model = make("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.bfloat16())
    return model


def hooked():
    model = make("mixtral")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


FIRST = r"model\.layers\.0\.mlp"
REFUSED = {
    "shared": (shared, {}, rf"{FIRST} \(Qwen2MoeSparse.* shared experts .*\(shared_expert, "),
    "grouped": (grouped, {}, r"mlp \(DeepseekV3MoE\) cannot be replaced: .* groups of experts"),
    "quantised": (quantised, {}, r"MixtralForCausalLM is quantised \(fp8\)"),
    "two dtypes": (two_dtypes, {}, rf"{FIRST} \(Mixtral.* experts of several dtypes"),
    "hooks": (hooked, {}, rf"{FIRST} \(Mixtral.* has hooks, which an MoE layer"),
    "meta": (on_meta, {}, rf"{FIRST}\.gate.weight is on the meta device"),
    "twice": (twice, {}, "MixtralForCausalLM has no sparse blocks inside; known are FlexOlmo"),
    "dense": (lambda: make("Llama", intermediate_size=20), {}, "no sparse blocks inside; known"),
    "activation": (lambda: make("mixtral", hidden_act="relu"), {}, f"{FIRST}: no built-in experts"),
    "jitter": (lambda: make("mixtral", router_jitter_noise=0.1), {}, f"{FIRST}: jitter_noise=0.1"),
    "top-1": (
        lambda: make("mixtral", num_experts_per_tok=1), {}, f"{FIRST}: the weight of a token's one",
    ),
    "decided": (lambda: make("mixtral"), {"top_k": 1, "hidden_dim": 5}, "decide hidden_dim, top_k"),
    "contradiction": (
        lambda: make("olmoe"), {"normalize_before_dropping": True}, "contradict each other",
    ),
    "load": (lambda: make("mixtral"), {"capacity_factor": "full"}, "capacity_factor='full' must"),
}  # fmt: skip


@pytest.mark.parametrize("build, options, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(build, options, words):
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        replace_moe(model, **options)
    assert [type(module) for module in model.modules()] == before


def test_misspelt_options_and_allowed_jitter():
    with pytest.raises(TypeError, match="overlap_degre=.*did you mean"):
        replace_moe(make("mixtral"), overlap_degre=2)
    model = make("mixtral", router_jitter_noise=0.1)
    replace_moe(model, input_jitter=0.1)
    assert model.model.layers[0].mlp.config.input_jitter == 0.1


def test_a_load_bias_has_no_way_back():
    model = make("mixtral").train()
    dense = copy.deepcopy(model)
    blocks = replace_moe(model, load_bias="quantile")
    with training.collect_aux(model) as aux:
        model(tokens())
    training.update_load_bias(model, [aux])
    for back in (restore_moe, original_state_dict):
        with pytest.raises(ValueError, match=rf"{FIRST} chooses experts by a load bias"):
            back(model, blocks)
    for layer in model.model.layers:
        layer.mlp.gate.load_bias.zero_()
    assert_same_state(original_state_dict(model, blocks), dense.state_dict())
    with pytest.raises(ValueError, match=rf"{FIRST} is not a layer of replace_moe"):
        restore_moe(dense, blocks)
