"""What replace_moe refuses, and in which words; nothing is changed then."""

import copy

import pytest
import torch
from helpers.assertions import assert_same_state
from tiny_models import make, tokens
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import original_state_dict, replace_moe, restore_moe
from fairseq_tutel.moe import MoELayer

pytestmark = pytest.mark.extras


def own_rules():
    """Mixtral's experts behind a router whose bias is on logits, as no option has it."""
    model = make("mixtral")
    for layer in model.model.layers:
        layer.mlp = OwnBlock(layer.mlp)
    return model


class OwnBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.gate, self.experts = OwnRouter(block.gate.weight), block.experts

    def forward(self, x):
        weights, index = self.gate(x.flatten(0, 1))
        return self.experts(x.flatten(0, 1), index, weights).view(x.shape)


class OwnRouter(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x @ self.weight.t()).tanh().topk(2, -1)


def other_experts():
    """Experts that return more than their two projections."""
    model = make("mixtral")
    experts = model.model.layers[0].mlp.experts
    forward = experts.forward
    experts.forward = lambda x, index, weights: forward(x, index, weights) + x
    model.model.layers[0].mlp = OwnBlock(model.model.layers[0].mlp)
    return model


class JetMoeMoE(nn.Module):
    pass


def by_name():
    model = make("mixtral")
    model.model.layers[0].mlp = JetMoeMoE()
    return model


def quantised():
    model = make("mixtral")
    model.hf_quantizer = type("Quantizer", (), {})()
    model.hf_quantizer.quantization_config = type("Config", (), {"quant_method": "fp8"})()
    return model


def on_meta():
    with torch.device("meta"):
        return make("mixtral")


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
    "own rules": (
        own_rules, {"load_bias": "sign", "z_loss_weight": 0.1},
        rf"{FIRST} \(OwnBlock\) goes on routing.*leave out load_bias, z_loss_weight",
    ),
    "other experts": (other_experts, {}, rf"{FIRST} \(OwnBlock\) cannot .* more than their proj"),
    "by name": (by_name, {}, rf"{FIRST} \(JetMoeMoE\) cannot be replaced: its experts have one b"),
    "quantised": (quantised, {}, r"MixtralForCausalLM is quantised \(fp8\)"),
    "two dtypes": (two_dtypes, {}, rf"{FIRST} \(Mixtral.* experts of several dtypes"),
    "hooks": (hooked, {}, rf"{FIRST} \(Mixtral.* has hooks, which an MoE layer"),
    "meta": (on_meta, {}, rf"{FIRST}\.experts.gate_up_proj is on the meta device"),
    "twice": (twice, {}, "MixtralForCausalLM has no sparse blocks inside: no module with"),
    "dense": (lambda: make("llama"), {}, "no sparse blocks inside"),
    "decided": (lambda: make("mixtral"), {"top_k": 1, "hidden_dim": 5}, "decide hidden_dim, top_k"),
    "contradiction": (
        lambda: make("olmoe", norm_topk_prob=False), {"normalize_before_dropping": True},
        "contradicts unnormalized",
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


def test_misspelt_options():
    with pytest.raises(TypeError, match="overlap_degre=.*did you mean"):
        replace_moe(make("mixtral"), overlap_degre=2)


@pytest.mark.parametrize("options, own_routing", [
    ({"router_jitter_noise": 0.1}, True),
    ({"num_experts_per_tok": 1}, True),  # its weight is 1, which no option says
    ({"router_jitter_noise": 0.1, "input_jitter": 0.1}, False),
], ids=["jitter", "top-1", "jitter of the layer"])  # fmt: skip
def test_what_no_option_says_stays_with_the_models_block(options, own_routing):
    options = dict(options)
    moe = {name: options.pop(name) for name in ("input_jitter",) if name in options}
    model, dense = (make("mixtral", **options).train() for _ in range(2))
    replace_moe(model, **moe)
    layer = model.model.layers[0].mlp
    assert isinstance(layer, MoELayer) != own_routing
    if own_routing:
        torch.manual_seed(3)
        want = dense(tokens())[0]
        torch.manual_seed(3)
        torch.testing.assert_close(model(tokens())[0], want, rtol=1e-4, atol=1e-4)
    else:
        assert layer.config.input_jitter == 0.1


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
