"""LoRA on experts: frozen weights, merging, checkpoints, files. Numbers: test_product.py."""

import contextlib
import json
import os

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.saved import SavedBytes
from safetensors.torch import load_file, save_file

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer, hold_experts
from fairseq_tutel.moe.experts import LoRAExperts

E, M, F, TOKENS, RANK, ALPHA = 4, 6, 8, 24, 3, 6.0


def make(network="ffn", experts=E, groups=None, seed=3, lora=True, storage="same", **options):
    """Return a layer whose updates are as large as the weights."""
    torch.manual_seed(0)
    given = {} if network == "ffn" else {"expert_options": {"bias": True}}
    layer = MoELayer(
        M, experts, F, expert_network=network, groups=groups, seed=seed,
        **{"capacity_factor": 0.0, "second_expert_policy": "all", **given, **options},
    )  # fmt: skip
    if lora:
        layer.experts = LoRAExperts(layer.experts, RANK, ALPHA, storage, seed)
        fill(layer)
    return layer


@torch.no_grad()
def fill(layer):
    """Draw B by the expert's global number; slices take their part."""
    bank = layer.experts
    for name, param in bank.updates.items():
        if name.endswith("lora_B"):
            shape = bank.layout[name].shape(M, F)
            count = len(bank.layout[name].names)
            for slot, expert in enumerate(bank.expert_ids):
                drawn = torch.Generator().manual_seed(100 + expert)
                whole = torch.randn(count, *shape, generator=drawn).to(param.dtype)
                if bank.layout[name].slice_dim is not None:
                    index, slices = bank.hidden_slice
                    whole = whole.chunk(slices, 1)[index]
                param[slot * count : (slot + 1) * count] = 0.3 * whole


@pytest.mark.parametrize("held", [False, True], ids=["converted", "held"])
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_frozen_weights_in_fewer_bytes(storage, held):
    """The first output of converted weights: test_product.py."""
    layer, exact, x = make("swiglu", lora=False), make("swiglu"), torch.randn(TOKENS, M)
    if held:
        layer.experts = hold_experts(layer.experts, storage)
    training.add_lora(layer, RANK, ALPHA, storage="same" if held else storage, seed=3)
    fill(layer)
    bank, y = layer.experts, layer(x)
    assert bank.fc1_weight.element_size() == {"bf16": 2, "int8": 1}[storage]
    assert rms_ratio(y, exact(x)) < 0.02
    other = make("swiglu", storage=storage)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), y, rtol=0.02, atol=0.02)  # saved in bf16
    training.merge_lora(layer)
    assert layer.experts.fc1_weight.dtype == torch.bfloat16
    scales = [each.dtype for each in other.half().experts.buffers()]  # fp16 rounds small ones to 0
    assert scales == (2 * [torch.bfloat16] if storage == "int8" else [])
    assert rms_ratio(layer(x), exact(x)) < 0.02


def test_merging_and_state_dicts():
    layer, plain = make("swiglu"), make("swiglu", lora=False)
    names = list(plain.state_dict())
    x = torch.randn(TOKENS, M)
    y, other = layer(x), make("swiglu", seed=9)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    training.merge_lora(layer)
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-6)
    assert list(layer.state_dict()) == names
    assert type(layer.experts) is type(plain.experts)
    fresh = make("swiglu", lora=False)
    training.add_lora(fresh)
    assert torch.equal(fresh(x), plain(x))  # B begins as zero
    fresh.load_state_dict(plain.state_dict())


def test_weights_can_be_unfrozen():
    x, found = torch.randn(TOKENS, M), []
    for way in ("frozen", "unfrozen", "merged"):
        layer = make("swiglu")
        if way == "merged":
            training.merge_lora(layer)
        if way != "frozen":
            layer.requires_grad_()
        layer(x).square().sum().backward()
        params, names = layer.experts.named_parameters(), layer.experts.single_names()
        trained = [(names[name], param.grad) for name, param in params if param.requires_grad]
        found.append({k: v for pair in trained for k, v in zip(*pair, strict=True)})
    updates, every, weights = found
    torch.testing.assert_close(every, weights | updates, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("observed", [False, True])
def test_no_copy_of_weights_is_kept(observed):
    layer, x = make("swiglu"), torch.randn(4, M, requires_grad=True)
    if observed:
        layer.experts.register_forward_hook(lambda *call: None)
    with SavedBytes(x, *layer.parameters()) as saved:
        layer(x).square().sum()
    assert 0 < saved.largest() < layer.experts.fc2_weight.nbytes


def trained(groups):
    """Return a layer after two updates of SGD, each rank with its share of the tokens."""
    layer = make("swiglu", groups=groups, load_bias="sign").double()
    layer.gate.load_bias.copy_(torch.tensor([0.3, 0.0, -0.2, 0.1]))
    rank, world_size = process_world()
    x = torch.randn(TOKENS, M, generator=torch.Generator().manual_seed(5)).double()
    training.prepare_data_parallel(layer)
    layer.gate.requires_grad_(False)
    optimizer = torch.optim.SGD(layer.experts.updates.values(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x.chunk(world_size)[rank]).square().mean().backward()
        assert training.clip_grad_norm_(layer, 0.1) > 0.1
        optimizer.step()
    layer.gate.requires_grad_()  # not frozen: it is saved, too
    return layer


def untrained(groups=None):
    layer = make("swiglu", groups=groups, lora=False, load_bias="sign").double()
    torch.nn.init.zeros_(layer.gate.wg.weight)
    return layer


def check_files(folder, placement):
    groups = build_groups(E, placement=placement)
    layer, fresh = trained(groups), untrained(groups)
    training.save_lora(folder / "many", layer)
    training.load_lora(folder / "one", fresh)
    torch.testing.assert_close(layer.state_dict(), fresh.state_dict())


@pytest.mark.parametrize("ranks, placement", [(2, "replicated"), (8, "sliced")])
def test_files_on_other_ranks(ranks, placement, tmp_path):
    """Training on several ranks is that on one, and either loads the other's file."""
    layer, fresh = trained(None), untrained()
    training.save_lora(tmp_path / "one", layer)
    run_ranks(check_files, ranks, tmp_path, placement)
    training.load_lora(tmp_path / "many", fresh)
    torch.testing.assert_close(layer.state_dict(), fresh.state_dict())


class Moving(torch.nn.Module):
    """A module whose buffers move in training; one is not part of state dicts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(M))
        self.register_buffer("mask", torch.ones(M), persistent=False)

    def forward(self, x):
        return x - self.mean


CHANGES = {  # of a model whose last layer has the weight of the first one
    "nothing": lambda first, moving, layer, last: None,
    "bias": lambda first, moving, layer, last: first.bias.add_(1),
    "tied": lambda first, moving, layer, last: last.weight.requires_grad_().add_(1),
    "load bias": lambda first, moving, layer, last: layer.gate.load_bias[0].fill_(9),
    "buffer": lambda first, moving, layer, last: moving.mean.add_(1),
    "weights": lambda *parts: parts[2].experts.fc1_weight.requires_grad_().mul_(3),
}


def model_with_lora(change="nothing", lora=True):
    """Return a model of which everything but LoRA's frozen weights may have been trained."""
    torch.manual_seed(2)
    layer = make(lora=False, load_bias="sign")
    model = torch.nn.Sequential(torch.nn.Linear(M, M), Moving(), layer, torch.nn.Linear(M, M))
    model[3].weight = model[0].weight
    if lora:
        training.add_lora(model, RANK, ALPHA, freeze=change not in ("bias", "buffer"))
        fill(layer)
    torch.no_grad()(CHANGES[change])(*model)
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["into a plain model", "into one with LoRA"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_saved_gives_the_same_output(change, lora, tmp_path):
    model, x = model_with_lora(change), torch.randn(TOKENS, M)
    training.save_lora(tmp_path / "once", model)
    loaded, again = model_with_lora(lora=lora), model_with_lora(lora=False)
    training.load_lora(tmp_path / "once", loaded)
    training.save_lora(tmp_path / "twice", loaded)
    training.load_lora(tmp_path / "twice", again)
    want = model(x)
    assert change == "nothing" or rms_ratio(model_with_lora()(x), want) > 1e-3
    torch.testing.assert_close([loaded(x), again(x)], [want, want])


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_killed_process_leaves_the_old_or_the_new(renamed, tmp_path, monkeypatch):
    old, new, x = make(), make(), torch.randn(TOKENS, M)
    new.experts = LoRAExperts(make(lora=False).experts, RANK, 5 * ALPHA, seed=1)
    fill(new)
    training.save_lora(tmp_path, old)
    replace, calls = os.replace, []

    def until_killed(*names):
        if len(calls) == renamed:
            raise KeyboardInterrupt
        calls.append(replace(*names))

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", until_killed)
        training.save_lora(tmp_path, new)
    loaded = make(lora=False)
    training.load_lora(tmp_path, loaded)
    torch.testing.assert_close(loaded(x), (new if renamed else old)(x))


@pytest.mark.parametrize("text", ["[3]", "", '{"r": true, "lora_alpha": 6}', '{"r": 3}'])
def test_damaged_options_are_named(text, tmp_path):
    """Files of older versions have rank and alpha in adapter_config.json alone."""
    layer, x = make(), torch.randn(TOKENS, M)
    training.save_lora(tmp_path, layer)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file(load_file(weights), weights)
    loaded = make(lora=False)
    training.load_lora(tmp_path, loaded)
    torch.testing.assert_close(loaded(x), layer(x))
    config.write_text(text)
    with pytest.raises(ValueError, match="adapter_config.json|rank=True"):
        training.load_lora(tmp_path, make(lora=False))


def test_names_in_files_and_what_is_frozen(tmp_path):
    layer = make()
    layer.gate.requires_grad_(False)
    training.save_lora(tmp_path, layer)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, ["fc1", "fc2"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.experts.3.fc1.lora_A.weight"].shape == (RANK, M)
    assert tensors["base_model.model.experts.3.fc1.lora_B.weight"].shape == (F, RANK)
    assert len(tensors) == E * 4
    rest = torch.nn.Sequential(torch.nn.Linear(M, M), MoELayer(M, 2, 4))
    training.add_lora(rest, freeze=False)
    frozen = [name for name, param in rest.named_parameters() if not param.requires_grad]
    assert frozen == [f"1.experts.fc{n}_{kind}" for n in (1, 2) for kind in ("weight", "bias")]


def test_refusals(tmp_path):
    layer, plain = make(), make(lora=False)
    layer.gate.requires_grad_(False)
    training.save_lora(tmp_path, layer)
    for call, what in (
        (lambda: training.add_lora(layer), "LoRA already"),
        (lambda: training.add_lora(torch.nn.Linear(2, 2)), "no MoE layer"),
        (lambda: training.add_lora(plain, rank=0), "rank=0"),
        (lambda: training.add_lora(plain, rank=True), "rank=True"),
        (lambda: training.add_lora(plain, alpha=float("inf")), "alpha=inf"),
        (lambda: training.add_lora(plain, alpha="8"), "alpha='8'"),
        (lambda: training.add_lora(plain, storage="fp4"), "fp4"),
        (lambda: training.merge_lora(plain), "no LoRA"),
        (lambda: training.save_lora(tmp_path, plain), "no LoRA"),
        (lambda: training.load_lora(tmp_path, make(experts=2, lora=False)), "has not"),
        (lambda: training.load_lora(tmp_path, make("swiglu", lora=False)), "lacks"),
        (lambda: hold_experts(layer.experts, "bf16"), "merge"),
        (lambda: training.add_lora(MoELayer(M, 2, experts=[torch.nn.Linear(M, M)] * 2)), "peft"),
    ):
        with pytest.raises(ValueError, match=what):
            call()
    assert all(param.requires_grad for param in plain.parameters())  # nothing was changed
