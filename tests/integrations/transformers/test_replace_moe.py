"""Mixtral, Qwen3-MoE and OLMoE with MoE layers: the same numbers, on ranks, and back to the bit."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers
from helpers.assertions import assert_same_state
from helpers.commands import ROOT
from safetensors.torch import load_file, save_file
from tiny_models import logits, tokens
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import original_state_dict, replace_moe, restore_moe
from fairseq_tutel.moe import MoELayer

pytestmark = pytest.mark.extras

# folder, and behind a comma what differs -> options
MODELS = {
    "mixtral": {}, "mixtral, gelu": {"hidden_act": "gelu"}, "mixtral, relu": {"hidden_act": "relu"},
    "mixtral, tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts": 4},
    "qwen3_moe, normalised": {"mlp_only_layers": [1], "num_experts": 4},
    "olmoe": {"norm_topk_prob": False, "num_experts_per_tok": 3}, "olmoe, normalised": {},
    "olmoe, top-1": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "olmoe, two experts": {"norm_topk_prob": False, "num_experts": 2},
}  # fmt: skip


def make(name, **more):
    return tiny_models.make(name.partition(",")[0], **MODELS[name], **more)


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_what_they_were(name):
    model, ids = make(name).train(), tokens()

    def outcome():
        model.zero_grad()
        found = model(ids, labels=ids, output_router_logits=True)
        found.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if ".mlp." not in n}
        gate = model.model.layers[0].mlp.gate
        grads["gate"] = getattr(gate, "wg", gate).weight.grad.clone()
        # transformers makes aux_loss of what it recorded of the routers
        outputs = found.logits, found.loss, found.aux_loss, found.router_logits
        return outputs, grads

    want, want_grads = outcome()
    sparse = [n for n, m in model.named_modules() if type(m).__name__.endswith("SparseMoeBlock")]
    blocks = replace_moe(model)
    assert list(blocks) == sparse and len(sparse) == (2 if "qwen3" in name else 3)
    assert all(isinstance(model.get_submodule(each), MoELayer) for each in sparse)
    assert all(param.is_meta for param in blocks[sparse[0]].experts.parameters())
    got, grads = outcome()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, want_grads, rtol=1e-4, atol=1e-5)
    assert grads["gate"].abs().max() > 1e-4


@pytest.mark.parametrize("trains", [(False, False), (True, False), (False, True)])
def test_frozen_matrices_half_and_mode_stay(trains):
    model = make("olmoe").bfloat16().eval()
    layer = model.model.layers[0]
    names = ("gate_up_proj", "down_proj")
    for name, on in zip(names, trains, strict=True):
        getattr(layer.mlp.experts, name).requires_grad_(on)
    want = logits(model)
    blocks = replace_moe(model)
    experts = layer.mlp.experts
    assert (experts.fc1_weight.requires_grad, experts.fc2_weight.requires_grad) == trains
    assert not layer.mlp.training and experts.fc1_weight.dtype is torch.bfloat16
    assert model.model.layers[1].mlp.experts.fc1_weight.requires_grad
    # a token that routes otherwise would be off by far more than the rounding of its experts
    assert (logits(model) - want).float().norm() < 0.04 * want.float().norm()
    model.train()
    restore_moe(model, blocks)
    assert layer.mlp.training
    assert tuple(getattr(layer.mlp.experts, name).requires_grad for name in names) == trains


@pytest.mark.parametrize("name, made", [
    ("moe/README.md", "trained"), ("integrations/transformers/FINETUNING.md", "merged"),
])  # fmt: skip
def test_the_pages_programs_run(name, made, tmp_path, monkeypatch):
    if "FINE" in name:
        pytest.importorskip("peft")
    page = ROOT / "fairseq_tutel" / name
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    if "FINE" not in name:
        programs = [each for each in programs if "original_state_dict" in each]
        assert len(programs) == 1
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(programs), str(page), "exec"), {})
    assert (tmp_path / made / "model.safetensors").exists()


def test_mxfp4_that_was_dequantised_is_saved_for_from_pretrained(tmp_path):
    first = tiny_models.make("gpt_oss", intermediate_size=32)
    first.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = state.pop(name).shape
        packed = experts, outputs, inputs // 32
        state[f"{name}_blocks"] = torch.randint(256, (*packed, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full(packed, 124, dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    quantised = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(quantised))
    dequantise = transformers.Mxfp4Config(dequantize=True)
    model = type(first).from_pretrained(tmp_path, quantization_config=dequantise).eval()
    want, blocks = logits(model), replace_moe(model)
    model.save_pretrained(tmp_path / "ours", state_dict=original_state_dict(model, blocks))
    restore_moe(model, blocks)
    model.save_pretrained(tmp_path / "restored")
    for name in ("ours", "restored"):
        again = type(first).from_pretrained(tmp_path / name, dtype=want.dtype).eval()
        torch.testing.assert_close(logits(again), want)


# what is refused, and in which words; nothing is changed then
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


def own_rules(model, _):
    """Put the experts behind a router whose bias is on logits, as no option has it."""
    for layer in model.model.layers:
        layer.mlp = OwnBlock(layer.mlp)


def other_experts(model, block):
    """Let experts return more than their two projections."""
    forward = block.experts.forward
    block.experts.forward = lambda x, index, weights: forward(x, index, weights) + x
    model.model.layers[0].mlp = OwnBlock(block)


def quantised(model, _):
    method = SimpleNamespace(quant_method="fp8")
    model.hf_quantizer = SimpleNamespace(quantization_config=method)


def two_dtypes(_, block):
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.bfloat16())


FIRST = r"model\.layers\.0\.mlp"
# words -> what is done to a Mixtral and its first block, or another model; options
REFUSED = {
    rf"{FIRST} \(OwnBlock\) goes on routing.*leave out load_bias, z_loss_weight":
        (own_rules, {"load_bias": "sign", "z_loss_weight": 0.1}),
    rf"{FIRST} \(OwnBlock\) cannot .* more than their proj": (other_experts, {}),
    rf"{FIRST} \(JetMoeMoE\) cannot be replaced: its experts have one b":
        (lambda model, _: setattr(model.model.layers[0], "mlp", JetMoeMoE()), {}),
    r"MixtralForCausalLM is quantised \(fp8\)": (quantised, {}),
    rf"{FIRST} \(Mixtral.* experts of several dtypes": (two_dtypes, {}),
    rf"{FIRST} \(Mixtral.* has hooks, which an MoE layer":
        (lambda _, block: block.register_forward_hook(print) and None, {}),
    rf"{FIRST}\.experts.gate_up_proj is on the meta device":
        (lambda model, _: model.to("meta"), {}),
    "MixtralForCausalLM has no sparse blocks inside: no module with":
        (lambda model, _: replace_moe(model) and None, {}),
    "no sparse blocks inside": (lambda *_: tiny_models.make("llama"), {}),
    "decide hidden_dim, top_k": (None, {"top_k": 1, "hidden_dim": 5}),
    "contradicts unnormalized":
        (lambda *_: make("olmoe"), {"normalize_before_dropping": True}),
    "capacity_factor='full' must": (None, {"capacity_factor": "full"}),
    "overlap_degre=.*did you mean": (None, {"overlap_degre": 2}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(words):
    (change, options), model = REFUSED[words], tiny_models.make("mixtral")
    model = change and change(model, model.model.layers[0].mlp) or model
    before = [type(module) for module in model.modules()]
    with pytest.raises(TypeError if "mean" in words else ValueError, match=words):
        replace_moe(model, **options)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("options, moe, own_routing", [
    ({"router_jitter_noise": 0.1}, {}, True),
    ({"num_experts_per_tok": 1}, {}, True),  # its weight is 1, which no option says
    ({"router_jitter_noise": 0.1}, {"input_jitter": 0.1}, False),
])  # fmt: skip
def test_what_no_option_says_stays_with_the_models_block(options, moe, own_routing):
    model, dense = (tiny_models.make("mixtral", **options).train() for _ in range(2))
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
    model = tiny_models.make("mixtral").train()
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
