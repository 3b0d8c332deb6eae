"""More experts and fewer: each new one against the old one that it is, by plain loops."""

import json

import pytest
import torch
from checkpoint_helpers import EXPERT_SHAPES, LAYERS, Reference, expert_name
from helpers.assertions import assert_same_state
from helpers.sets import names_in, set_names

from fairseq_tutel.checkpoint import inspect, load_file, read_set, reshard
from fairseq_tutel.checkpoint.growth import grow, shrink, to_dense
from fairseq_tutel.checkpoint.growth.selection import repeated

LOADS = {1: [10, 50, 30, 10], 3: [40, 40, 10, 30]}


@pytest.fixture
def saved(tmp_path):
    """A set of 4 experts on 2 ranks, and what its run logged of their load."""
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, 2)
    lines = [
        {"update": 2, "layers": {str(layer): [1, 1, 1, 1] for layer in LAYERS}},
        {"update": 4, "layers": {str(layer): load for layer, load in LOADS.items()}},
        {"update": 6, "layers": {str(layer): [5, 5] for layer in LAYERS}},  # of another number
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "expert_load.jsonl").write_text(text)
    return path


def gate_name(layer):
    return f"decoder.layers.{layer}.moe_layer.gate.wg.weight"


def check_experts(path, originals, seed=0):
    """Expert n of a layer is the original's, tensors and optimizer state, bit for bit; so is
    everything dense but the gates."""
    want, state = Reference(4, seed), read_set(path).state_of(range(len(originals[LAYERS[0]])))
    named = state["last_optimizer_state"]["named_state"]
    for layer in LAYERS:
        for number, original in enumerate(originals[layer]):
            for rest in EXPERT_SHAPES:
                mine, theirs = expert_name(layer, number, rest), expert_name(layer, original, rest)
                assert torch.equal(state["model"][mine], want.model[theirs])
                assert_same_state(named[mine], want.named[theirs])
        rows = named[gate_name(layer)]["exp_avg"]
        assert torch.equal(rows, want.named[gate_name(layer)]["exp_avg"][originals[layer]])
    for name in ("decoder.embed_tokens.weight", "decoder.layers.3.fc1.weight"):
        assert torch.equal(state["model"][name], want.model[name])
        assert_same_state(named[name], want.named[name])
    return state["model"]


@pytest.mark.parametrize(
    ("num_experts", "by", "originals"),
    [
        (8, "uniform", {1: [0, 0, 1, 1, 2, 2, 3, 3], 3: [0, 0, 1, 1, 2, 2, 3, 3]}),
        (6, "uniform", {1: [0, 0, 1, 1, 2, 3], 3: [0, 0, 1, 1, 2, 3]}),
        # loads 50 30 10 10: 50 -> 25, 30 -> 15; 40 40 30 10: each of the three once, then 40 -> 13
        (6, "load", {1: [0, 1, 1, 2, 2, 3], 3: [0, 0, 1, 1, 2, 3]}),
        (8, "load", {1: [0, 1, 1, 1, 1, 2, 2, 3], 3: [0, 0, 0, 1, 1, 2, 3, 3]}),
    ],
)
def test_grown_experts_are_copies(saved, tmp_path, num_experts, by, originals, caplog):
    caplog.set_level("INFO", "fairseq_tutel")
    out = grow(saved, str(tmp_path / "more.pt"), num_experts, by=by)
    model = check_experts(out, originals)
    assert names_in(tmp_path) >= set_names("more", 2)
    for layer in LAYERS:
        rows, want = model[gate_name(layer)], Reference(4).model[gate_name(layer)]
        new = [n > 0 and originals[layer][n - 1] == e for n, e in enumerate(originals[layer])]
        assert repeated(originals[layer]) == [n for n, copy in enumerate(new) if copy]
        old = torch.tensor(new).logical_not()
        assert torch.equal(rows[old], want)
        moved = rows[~old] - want[torch.tensor(originals[layer])[~old]]
        assert 0 < moved.abs().max() < 0.05 and len(moved.unique(dim=0)) == len(moved)
    # what differs from the command that trained the source
    assert f"continue training with: --moe-expert-count {num_experts}" in caplog.messages
    report, copied = inspect(out), "the most loaded" if by == "load" else "each in turn"
    assert report["consistent"] and report["num_experts"] == num_experts
    assert report["growth"] == [f"4 -> {num_experts} (grow after 7 updates: copies of {copied})"]


def test_grown_resharded_and_shrunk_is_what_it_was(saved, tmp_path, caplog):
    caplog.set_level("INFO", "fairseq_tutel")
    grown = grow(saved, str(tmp_path / "grown.pt"), 8, ranks=4)
    placed = reshard(grown, str(tmp_path / "placed.pt"), 2)
    check_experts(placed, dict.fromkeys(LAYERS, [0, 0, 1, 1, 2, 2, 3, 3]))
    layers = dict.fromkeys((f"decoder.{n}" for n in LAYERS), [2, 1, 9, 1, 2, 1, 9, 3])
    (tmp_path / "load").write_text(json.dumps({"update": 9, "layers": layers}) + "\n")
    back = shrink(placed, str(tmp_path / "back.pt"), 4, load=str(tmp_path / "load"))
    model = check_experts(back, dict.fromkeys(LAYERS, [0, 1, 3, 3]))
    for layer in LAYERS:  # experts 0, 2, 6 are originals, 7 a copy
        want = Reference(4).model[gate_name(layer)]
        assert torch.equal(model[gate_name(layer)][:3], want[[0, 1, 3]])
    assert [text.split(" (")[0] for text in inspect(back)["growth"]] == ["4 -> 8", "8 -> 4"]
    assert "continue training with: --moe-expert-count 4" in caplog.messages


@pytest.mark.parametrize("how", ["one", "mean"])
def test_a_dense_ffn_is_the_most_loaded_expert_or_the_mean_by_load(saved, tmp_path, how):
    model = load_file(to_dense(saved, str(tmp_path / "dense.pt"), how))["model"]
    reference = Reference(4).model
    for layer, load in LOADS.items():
        for rest in EXPERT_SHAPES:
            experts = [reference[expert_name(layer, number, rest)] for number in range(4)]
            want = experts[load.index(max(load))]
            if how == "mean":
                want = sum(n * each.double() for n, each in zip(load, experts, strict=True))
                want = (want / sum(load)).float()
            got = model[f"decoder.layers.{layer}.{rest}"]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
