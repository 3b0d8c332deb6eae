"""Adapters of experts beside those of peft: files both ways, to the bit, and orders of calls."""

import json

import pytest
import torch
from helpers.distributed import on_ranks
from safetensors.torch import load_file
from tiny_models import adapters, call_all, logits, make

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import (
    load_adapters,
    original_state_dict,
    replace_moe,
    restore_moe,
    save_adapters,
)
from fairseq_tutel.moe import MoELayer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.extras

# interleaved and transposed; gate and up side by side; without a gate
FOLDERS = {"gpt_oss": "gate_up_proj", "qwen3_moe": "gate_up_proj", "nemotron_h": "up_proj"}


def trained_by_peft(folder, path):
    model = peft.get_peft_model(make(folder), adapters(FOLDERS[folder], "down_proj"))
    model.save_pretrained(path)
    return model


def loaded_here(folder, path):
    model = make(folder)
    blocks = replace_moe(model)
    return model, blocks, load_adapters(path, model, blocks)


def files(path):
    """Return the tensors and the options that decide what an adapter computes."""
    options = json.loads((path / "adapter_config.json").read_text())
    kept = {name: options[name] for name in ("r", "lora_alpha")}
    return load_file(path / "adapter_model.safetensors"), kept


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_go_both_ways(folder, tmp_path):
    theirs = trained_by_peft(folder, tmp_path / "peft")
    model, blocks, left = loaded_here(folder, tmp_path / "peft")
    assert not left and (logits(theirs) - logits(make(folder))).abs().max() > 0.01
    close(logits(model), logits(theirs))
    save_adapters(tmp_path / "same", model, blocks)
    torch.testing.assert_close(files(tmp_path / "same"), files(tmp_path / "peft"), rtol=0, atol=0)

    for layer in (model.get_submodule(name) for name in blocks):  # trained here: each its own A
        for param in layer.experts.updates.values():
            torch.nn.init.normal_(param, 0, 0.3)
    save_adapters(tmp_path / "ours", model, blocks)
    close(logits(peft.PeftModel.from_pretrained(make(folder), tmp_path / "ours")), logits(model))
    again, *_ = loaded_here(folder, tmp_path / "ours")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@on_ranks(2)
def test_two_ranks_have_the_files_of_one(tmp_path):
    folder, rank = "gpt_oss", torch.distributed.get_rank()
    if rank == 0:
        trained_by_peft(folder, tmp_path / "peft")
    torch.distributed.barrier()
    model, blocks, _ = loaded_here(folder, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(make(folder), tmp_path / "peft")
    close(logits(model), logits(theirs))
    save_adapters(tmp_path / "ranks", model, blocks)
    got, want = files(tmp_path / "ranks"), files(tmp_path / "peft")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="no global numbers: on several ranks call add_lora"):
        training.prepare_data_parallel(call_all("RT", "qwen3_moe")[0])


def test_other_adapters_are_left_or_refused(tmp_path):
    trained_by_peft("qwen3_moe", tmp_path / "all")
    wider = adapters(FOLDERS["qwen3_moe"], "down_proj")
    wider.target_modules = {"q_proj"}
    peft.get_peft_model(make("qwen3_moe"), wider).save_pretrained(tmp_path / "attention")
    *_, left = loaded_here("qwen3_moe", tmp_path / "attention")
    assert len(left) == 2 * 3 and all(".q_proj.lora_" in name for name in left)
    model = make("qwen3_moe")
    blocks = replace_moe(model)
    with pytest.raises(ValueError, match="has no LoRA: call add_lora"):
        save_adapters(tmp_path, model, blocks)
    training.add_lora(model, freeze=False)
    with pytest.raises(ValueError, match="embed_tokens.weight is trained, too"):
        save_adapters(tmp_path, model, blocks)
    path = tmp_path / "all" / "adapter_config.json"
    options = json.loads(path.read_text())
    for change, words in (
        ({"rank_pattern": {"down_proj": 4}}, "rank_pattern=.*has not"),
        ({"r": 3}, "the model has rank=8"),
    ):
        path.write_text(json.dumps({**options, **change}))
        with pytest.raises(ValueError, match=words):
            load_adapters(tmp_path / "all", model, blocks)


# order of calls -> words of the error; None: the output follows from all of them
ORDERS = {
    "RT": None, "RB": None, "RPl": None, "PRl": None, "RlP": None,
    "TR": "has adapters of peft on its experts: call replace_moe first",
    "RTl": "use either add_lora or target_parameters",
    "RlT": "experts.fc1_weight is no parameter any more",
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_calls(order):
    words = ORDERS[order]
    if words is not None:
        with pytest.raises(ValueError, match=words):
            logits(call_all(order, "qwen3_moe")[0])
        return
    model, blocks = call_all(order, "qwen3_moe")
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(param, 0, 0.2)
    found = logits(model)
    model = model.merge_and_unload()
    if order == "RlP":
        for back in (restore_moe, original_state_dict):
            with pytest.raises(ValueError, match="merge_lora"):
                back(model, blocks)
    if "l" in order:
        training.merge_lora(model)
    close(found, logits(model))
    assert (found - logits(make("qwen3_moe"))).abs().max() > 0.1


@pytest.mark.parametrize("network", ["ffn", "swiglu", "clamped_swiglu"])
def test_peft_trains_stacked_experts(network):
    """dA = s B^T dW and dB = s dW A^T, with dW of a layer that has the merged weights."""

    def layer():
        torch.manual_seed(0)
        return torch.nn.Sequential(MoELayer(6, 4, 8, expert_network=network, seed=1)).double()

    model = peft.get_peft_model(layer(), adapters("fc1_weight", "fc2_weight"))
    merged, x = layer(), torch.randn(12, 6, dtype=torch.float64)
    bank, wrapper = merged[0].experts, model.base_model.model[0].experts
    wrappers = {"fc2_weight": wrapper, "fc1_weight": wrapper.base_layer}
    parts = {name: each.get_delta_factors("default") for name, each in wrappers.items()}
    with torch.no_grad():
        for name, (b, a, scale) in parts.items():
            getattr(bank, name).add_(scale * b @ a)
    for each in (model, merged):
        each(x).square().sum().backward()
    torch.testing.assert_close(model(x), merged(x))
    for name, (b, a, scale) in parts.items():
        dw, found = getattr(bank, name).grad, wrappers[name]
        d_a, d_b = (getattr(found, f"lora_{kind}")["default"].weight.grad for kind in "AB")
        torch.testing.assert_close(d_a.view_as(a), scale * b.mT @ dw)
        torch.testing.assert_close(
            d_b.view(len(d_b), -1, len(a)).permute(2, 0, 1), scale * dw @ a.mT
        )
