"""Mixtral, Qwen3-MoE and OLMoE with MoE layers: the same numbers, on ranks, and back to the bit."""

import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.replaced import take_steps
from safetensors.torch import load_file, save_file
from tiny_models import logits, tokens

from fairseq_tutel import training
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.integrations.transformers import (
    original_state_dict,
    replace_moe,
    restore_moe,
)
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


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("training_mode", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_what_they_were(name, training_mode):
    model = make(name).train(training_mode)
    ids = tokens()

    def outcome():
        model.zero_grad()
        found = model(ids, labels=ids, output_router_logits=True)
        found.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if ".mlp." not in n}
        gate = model.model.layers[0].mlp.gate
        grads["gate"] = getattr(gate, "wg", gate).weight.grad
        return found, {n: grad.clone() for n, grad in grads.items()}

    want, want_grads = outcome()
    sparse = [n for n, m in model.named_modules() if type(m).__name__.endswith("SparseMoeBlock")]
    blocks = replace_moe(model)
    assert list(blocks) == sparse and len(sparse) == (2 if "qwen3" in name else 3)
    assert all(isinstance(model.get_submodule(each), MoELayer) for each in sparse)
    assert all(param.is_meta for param in blocks[sparse[0]].experts.parameters())
    got, grads = outcome()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.logits, want.logits, **close)
    torch.testing.assert_close(got.loss, want.loss, **close)
    # the loss that transformers makes of what it recorded of the routers
    assert len(got.router_logits) == len(sparse)
    torch.testing.assert_close(got.router_logits, want.router_logits, **close)
    torch.testing.assert_close(got.aux_loss, want.aux_loss, **close)
    assert grads["gate"].abs().max() > 1e-4
    for each, grad in want_grads.items():
        torch.testing.assert_close(grads[each], grad, rtol=1e-4, atol=1e-5, msg=each)


@pytest.mark.parametrize("name", ["mixtral, tied", "olmoe"])
def test_save_pretrained_writes_what_the_original_class_loads(name, tmp_path):
    model = make(name, dtype=torch.bfloat16 if name == "olmoe" else torch.float32)
    kind, want = type(model), state_of(model)
    model.save_pretrained(tmp_path / "before")
    blocks = replace_moe(model)
    model.save_pretrained(tmp_path / "replaced", state_dict=original_state_dict(model, blocks))
    restore_moe(model, blocks)
    assert_same_state(model.state_dict(), want)
    model.save_pretrained(tmp_path / "restored")
    files = [sorted(p.name for p in (tmp_path / f).iterdir()) for f in ("before", "replaced")]
    assert files[0] == files[1]
    for folder in ("before", "replaced", "restored"):
        loaded, report = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report[each] for each in ("missing_keys", "unexpected_keys"))
        assert_same_state(loaded.state_dict(), want)
        size = (tmp_path / folder / "model.safetensors").stat().st_size
        assert size == (tmp_path / "before" / "model.safetensors").stat().st_size
    again = replace_moe(model)  # and once more
    assert list(again) == list(blocks)


@pytest.mark.parametrize("trains", [(False, False), (True, False), (False, True)])
def test_frozen_matrices_half_and_mode_stay(trains):
    model = make("olmoe").bfloat16().eval()
    layer = model.model.layers[0]
    names = ("gate_up_proj", "down_proj")
    for name, on in zip(names, trains, strict=True):
        getattr(layer.mlp.experts, name).requires_grad_(on)
    want = model(tokens()).logits
    blocks = replace_moe(model)
    experts = layer.mlp.experts
    assert (experts.fc1_weight.requires_grad, experts.fc2_weight.requires_grad) == trains
    assert not layer.mlp.training and experts.fc1_weight.dtype is torch.bfloat16
    assert model.model.layers[1].mlp.experts.fc1_weight.requires_grad
    got = model(tokens()).logits
    # a token that routes otherwise would be off by far more than the rounding of its experts
    assert (got - want).float().norm() < 0.04 * want.float().norm()
    model.train()
    restore_moe(model, blocks)
    assert layer.mlp.training
    assert tuple(getattr(layer.mlp.experts, name).requires_grad for name in names) == trains


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_lora(name):
    """Train with gradient checkpointing, merge, and put the blocks back."""
    model, ids = make(name).train(), tokens()
    want = model(ids).logits
    blocks = replace_moe(model)
    optimizer = torch.optim.Adam(training.add_lora(model), lr=0.02)
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
    model.activation_checkpointing_enable({"use_reentrant": False})
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for restored in (restore_moe, original_state_dict):
        with pytest.raises(ValueError, match="merge_lora"):
            restored(model, blocks)
    trained = model(ids).logits
    training.merge_lora(model)
    restore_moe(model, blocks)
    torch.testing.assert_close(model(ids).logits, trained, rtol=1e-4, atol=1e-4)


# on ranks

EXCHANGES = {
    "plain": {},
    "overlapped": {"exchange": ExchangeConfig(overlap_degree=2)},
    "2dh": {"exchange": ExchangeConfig("2dh", ranks_per_node=2)},
    "sliced": {"placement": "sliced"},
    "sliced, r=0": {"placement": "sliced", "exchange": ExchangeConfig(r=0)},
}


def train_on_ranks(name, way, path):
    """Losses of the steps, and the original class's state dict; saved there as the ranks' set."""
    rank, world_size = process_world()
    model, ids = make(name), tokens().chunk(world_size)[rank]
    options = {"balance_scope": "global", **EXCHANGES[way]}
    num_experts = model.model.layers[0].mlp.gate.num_experts
    groups = build_groups(num_experts, placement=options.pop("placement", "replicated"))
    with torch.no_grad():
        before = model(ids).logits
        blocks = replace_moe(model, groups=groups, **options)
        assert (model(ids).logits - before).abs().max() < 1e-5
    layer = model.model.layers[0].mlp
    assert layer.experts.fc1_weight.numel() * world_size == 2 * num_experts * 24 * 32
    model.train()
    net = training.wrap_data_parallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = take_steps(model, optimizer, lambda: net(ids, labels=ids).loss)
    training.save_checkpoint(path, model, optimizer)
    state = original_state_dict(net, blocks)
    assert bool(state) == (rank == 0)
    restore_moe(net, blocks)
    if rank == 0:
        assert_same_state(model.state_dict(), state)
    return losses, state


# test_models.py trains every model on two ranks by the plain exchange, saves and restores it
@pytest.mark.parametrize("name, way, world_size", [
    ("qwen3_moe", "overlapped", 2), ("olmoe", "2dh", 4),
    ("olmoe, two experts", "sliced", 4), ("olmoe, two experts", "sliced, r=0", 4),
])  # fmt: skip
def test_ranks_are_one_model_and_train_as_one(name, way, world_size, tmp_path):
    path = str(tmp_path / "ranks.pt")
    losses, (state, *_) = zip(
        *run_ranks(train_on_ranks, world_size, name, way, path, timeout=150), strict=True
    )
    alone, want = train_on_ranks(name, "plain", str(tmp_path / "alone.pt"))
    means = [sum(step) / world_size for step in zip(*losses, strict=True)]
    assert means == pytest.approx(alone, rel=1e-4)
    assert all(later < earlier for earlier, later in zip(means, means[1:], strict=False))
    for key, value in want.items():
        torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, msg=key)
    # the set of all ranks, in one process
    model = make(name)
    blocks = replace_moe(model)
    training.load_checkpoint(path, model)
    assert_same_state(original_state_dict(model, blocks), state)


@pytest.mark.parametrize(
    "name, made",
    [("moe/README.md", "trained"), ("integrations/transformers/FINETUNING.md", "merged")],
)
def test_the_pages_programs_run(name, made, tmp_path, monkeypatch):
    if "FINE" in name:
        pytest.importorskip("peft")
    page = Path(__file__).parents[3] / "fairseq_tutel" / name
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
