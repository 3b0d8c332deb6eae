"""What replace_moe refuses, and in which words; nothing is changed then."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.assertions import assert_same_state
from tiny_models import make, tokens
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import original_state_dict, replace_moe, restore_moe
from fairseq_tutel.moe import MoELayer

pytestmark = pytest.mark.extras


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


class JetMoeMoE(nn.Module):
    pass


# what is done to a Mixtral and its first block; None, or another model


def own_rules(model, _):
    """Put the experts behind a router whose bias is on logits, as no option has it."""
    for layer in model.model.layers:
        layer.mlp = OwnBlock(layer.mlp)


def other_experts(model, block):
    """Let experts return more than their two projections."""
    forward = block.experts.forward
    block.experts.forward = lambda x, index, weights: forward(x, index, weights) + x
    model.model.layers[0].mlp = OwnBlock(block)


def by_name(model, _):
    model.model.layers[0].mlp = JetMoeMoE()


def quantised(model, _):
    method = SimpleNamespace(quant_method="fp8")
    model.hf_quantizer = SimpleNamespace(quantization_config=method)


def two_dtypes(_, block):
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.bfloat16())


def hooked(_, block):
    block.register_forward_hook(lambda *_: None)


def unchanged(*_):
    pass


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
    "meta": (
        lambda model, _: model.to("meta"), {},
        rf"{FIRST}\.experts.gate_up_proj is on the meta device",
    ),
    "twice": (
        lambda model, _: replace_moe(model) and None, {},
        "MixtralForCausalLM has no sparse blocks inside: no module with",
    ),
    "dense": (lambda *_: make("llama"), {}, "no sparse blocks inside"),
    "decided": (unchanged, {"top_k": 1, "hidden_dim": 5}, "decide hidden_dim, top_k"),
    "contradiction": (
        lambda *_: make("olmoe", norm_topk_prob=False), {"normalize_before_dropping": True},
        "contradicts unnormalized",
    ),
    "load": (unchanged, {"capacity_factor": "full"}, "capacity_factor='full' must"),
    "misspelt": (unchanged, {"overlap_degre": 2}, "overlap_degre=.*did you mean"),
}  # fmt: skip


@pytest.mark.parametrize("change, options, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(change, options, words):
    model = make("mixtral")
    model = change(model, model.model.layers[0].mlp) or model
    before = [type(module) for module in model.modules()]
    with pytest.raises(TypeError if "mean" in words else ValueError, match=words):
        replace_moe(model, **options)
    assert [type(module) for module in model.modules()] == before


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
