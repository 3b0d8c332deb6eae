"""More experts and fewer: each new one against the old one that it is, by plain loops."""

import json
import re

import pytest
import torch
from checkpoint_helpers import LAYERS, Reference, assert_same, expert_name, names_in, set_names
from sabotage import Killed, attempt, interrupt_everywhere

from fairseq_tutel.checkpoint import (
    AllRanks,
    CheckpointError,
    inspect,
    read_set,
    recover_directory,
    remove_set,
    reshard,
)
from fairseq_tutel.checkpoint.__main__ import main
from fairseq_tutel.checkpoint.growth import grow, shrink
from fairseq_tutel.checkpoint.growth.dense_optimizer import (
    expert_state,
    fresh_state,
    named_optimizer,
)
from fairseq_tutel.checkpoint.growth.recipes import copies, is_copy, merged_pairs

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
            for rest in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
                mine, theirs = expert_name(layer, number, rest), expert_name(layer, original, rest)
                assert torch.equal(state["model"][mine], want.model[theirs])
                assert_same(named[mine], want.named[theirs])
        rows = named[gate_name(layer)]["exp_avg"]
        assert torch.equal(rows, want.named[gate_name(layer)]["exp_avg"][originals[layer]])
    for name in ("decoder.embed_tokens.weight", "decoder.layers.3.fc1.weight"):
        assert torch.equal(state["model"][name], want.model[name])
        assert_same(named[name], want.named[name])
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
def test_grown_experts_are_copies(saved, tmp_path, num_experts, by, originals):
    out = grow(saved, str(tmp_path / "more.pt"), num_experts, by=by)
    model = check_experts(out, originals)
    assert names_in(tmp_path) >= set_names("more", 2)
    for layer in LAYERS:
        rows, want = model[gate_name(layer)], Reference(4).model[gate_name(layer)]
        new = [n > 0 and originals[layer][n - 1] == e for n, e in enumerate(originals[layer])]
        assert new == is_copy([((e, 1.0),) for e in originals[layer]])
        old = torch.tensor(new).logical_not()
        assert torch.equal(rows[old], want)
        moved = rows[~old] - want[torch.tensor(originals[layer])[~old]]
        assert 0 < moved.abs().max() < 0.05 and len(moved.unique(dim=0)) == len(moved)
    report = inspect(out)
    assert report["consistent"] and report["num_experts"] == num_experts
    assert report["growth"] == [f"4 -> {num_experts} (grow after 7 updates: " + (
        "copies of the most loaded)" if by == "load" else "copies of each in turn)"
    )]  # fmt: skip


def test_grown_resharded_and_shrunk_is_what_it_was(saved, tmp_path):
    grown = grow(saved, str(tmp_path / "grown.pt"), 8, ranks=4)
    placed = reshard(grown, str(tmp_path / "placed.pt"), 2)
    check_experts(placed, dict.fromkeys(LAYERS, [0, 0, 1, 1, 2, 2, 3, 3]))
    load = tmp_path / "load.jsonl"
    of_eight = [[2, 1, 9, 1, 2, 1, 9, 3], [2, 1, 9, 1, 2, 1, 9, 3]]
    line = {
        "update": 9,
        "layers": {f"decoder.{n}": c for n, c in zip(LAYERS, of_eight, strict=True)},
    }
    load.write_text(json.dumps(line) + "\n")
    back = shrink(placed, str(tmp_path / "back.pt"), 4, load=str(load))
    model = check_experts(back, dict.fromkeys(LAYERS, [0, 1, 3, 3]))
    for layer in LAYERS:  # experts 0, 2, 6 are originals, 7 a copy
        want = Reference(4).model[gate_name(layer)]
        assert torch.equal(model[gate_name(layer)][:3], want[[0, 1, 3]])
    assert [text.split(" (")[0] for text in inspect(back)["growth"]] == ["4 -> 8", "8 -> 4"]


def test_pairs_are_merged_by_their_router_rows_and_load(tmp_path):
    path = str(tmp_path / "m.pt")
    reference = Reference(4)
    for layer in LAYERS:
        rows = reference.model[gate_name(layer)]
        rows[2] = 3 * rows[0] + 0.001
    for name, state in reference.named.items():
        if "exp_avg_scale" in state:
            state["exp_avg_scale"] = 0.5 if ".experts.0." in name else 2.0
    reference.save(path, 1)
    (tmp_path / "expert_load.jsonl").write_text(
        json.dumps({"layers": {str(layer): [30, 1, 10, 1] for layer in LAYERS}}) + "\n"
    )
    state = read_set(shrink(path, str(tmp_path / "x.pt"), 3, how="merge")).state_of(range(3))
    named = state["last_optimizer_state"]["named_state"]
    for layer in LAYERS:
        for rest in ("fc1.weight", "fc2.bias"):
            names = [expert_name(layer, number, rest) for number in range(4)]
            first, third = (reference.model[names[number]] for number in (0, 2))
            want = 0.75 * first.double() + 0.25 * third.double()
            torch.testing.assert_close(state["model"][names[0]].double(), want, rtol=1e-6, atol=0)
            assert torch.equal(state["model"][names[2]], reference.model[names[3]])
            merged, parts = named[names[0]], [reference.named[names[n]] for n in (0, 2)]
            want = sum(
                w * p["exp_avg"].double() * p["exp_avg_scale"]
                for w, p in zip((0.75, 0.25), parts, strict=True)
            )
            got = merged["exp_avg"].double() * merged["exp_avg_scale"]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            assert merged["step"] == 7 and merged["exp_avg"].dtype == torch.float16


def test_choices_without_files():
    assert copies([1, 1, 1], 5) == [((e, 1.0),) for e in (0, 0, 1, 1, 2)]
    rows = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0.1], [0.1, 1.0]])
    merged = merged_pairs([1.0, 3.0, 1.0, 1.0], rows, 2)
    assert merged == [((0, 0.5), (2, 0.5)), ((1, 0.75), (3, 0.25))]
    assert merged_pairs([0.0, 0.0, 0.0, 0.0], rows, 3)[0] == ((0, 0.5), (2, 0.5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("grow m.pt x.pt --num-experts 4", "has 4 experts, 4 are not more; `shrink`"),
        ("grow m.pt x.pt --num-experts 5", "5 experts cannot be spread over 2 .* --ranks"),
        ("grow m.pt x.pt --num-experts 8 --by load --load no.jsonl", "no.jsonl: no such file"),
        ("grow m.pt m.pt --num-experts 8 --force", "is the source itself"),
        ("shrink m.pt x.pt --num-experts 4", "has 4 experts, of which a token chooses"),
        ("shrink m.pt x.pt --dense shared", "has no shared expert .* --dense one or"),
        ("shrink m.pt m.pt --dense --data nowhere", "is the source itself"),
        ("shrink m.pt x.pt --dense --ranks 2 --data nowhere", "--ranks 2: a dense model"),
        ("upcycle m.pt x.pt --num-experts 8", "has experts; `grow` makes more of them"),
    ],
)
def test_refusals_are_one_line(saved, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    assert main(words.split()) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1
    assert re.search(message, output), output
    assert names_in(tmp_path) == before


def test_a_set_whose_experts_are_held_back_does_not_grow_further(saved, tmp_path):
    held = grow(saved, str(tmp_path / "held.pt"), 8, ramp=100)
    bias = read_set(held).shared_state()["model"]["decoder.layers.1.moe_layer.gate.load_bias"]
    assert bias.tolist() == [0, -999] * 4
    for change in (grow, shrink):
        with pytest.raises(CheckpointError, match="7 updates .* under way, until update 107"):
            change(held, str(tmp_path / "x.pt"), 12 if change is grow else 4)


@pytest.mark.parametrize("interruption", [OSError, Killed])
def test_a_set_that_grows_in_place_is_the_old_one_or_the_new_one(
    tmp_path, monkeypatch, interruption
):
    """At any file operation: an error, as of a full disk, or a kill."""
    path, other = str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "other" / "m.pt")
    reference = Reference(2, layers=(1,))
    reference.save(other, 1)
    old = read_set(other)

    def prepare():
        remove_set(path)
        reference.save(path, 1)

    def change(saboteur):
        def work():  # as a run does it, whose ranks hear of an error
            AllRanks().run_on_first("growing", lambda: grow(path, path, 4, ranks=2, in_place=True))

        return attempt(saboteur, work)

    def check(saboteur):
        recovered = set_names("checkpoint_last", 2 if saboteur.committed else 1)
        for recover in (lambda: None, lambda: recover_directory(str(tmp_path))):
            recover()
            found = read_set(path)
            copied = 2 if saboteur.committed else 1
            assert found.num_experts == 2 * copied and inspect(path)["consistent"]
            for number in range(found.num_experts):
                original = number // copied
                want = old.experts(range(original, original + 1))
                assert_same(found.experts(range(number, number + 1)), want)
        assert names_in(tmp_path) == recovered | {"other"}

    interrupt_everywhere(monkeypatch, interruption, prepare, change, check)


def test_statistics_with_scales_and_tied_weights_that_are_stored_twice():
    """A checkpoint of half weights has no storage in common; Adam's fp16 statistics have scales."""
    embedding, fc = torch.randn(3, 2), torch.randn(2, 2)
    model = {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens.weight": embedding,
        "decoder.layers.0.fc1.weight": fc,
        "decoder.output_projection.weight": embedding.clone(),
    }
    states = {
        number: {
            "step": 5,
            "exp_avg": torch.randn_like(param).half(),
            "exp_avg_scale": torch.tensor(0.25),
            "exp_avg_sq": torch.rand_like(param).half(),
            "exp_avg_sq_scale": torch.tensor(0.5),
        }
        for number, param in enumerate((embedding, fc))
    }
    stored = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    named = named_optimizer(stored, model, "m.pt")
    assert named["param_groups"] == [{"lr": 0.1}] and named["loss_scale"] is None
    names = ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"]
    assert_same(named["named_state"], dict(zip(names, states.values(), strict=True)))
    state = expert_state(states[1], num_experts=8, top_k=2, gradient=3.0)
    assert torch.equal(state["exp_avg"], states[1]["exp_avg"]) and state["step"] == 5
    assert state["exp_avg_scale"] == 0.25 * 3 / 8 and state["exp_avg_sq_scale"] == 0.5 * 9 / 16
    fresh = fresh_state(states[1], torch.zeros(8, 2))
    assert fresh["step"] == 0 and fresh["exp_avg"].shape == (8, 2) and fresh["exp_avg_scale"] == 1
    for change, words in (
        ({"state": {0: {"square_avg": fc}, 1: {}}}, "'square_avg' of .* is no state of Adam"),
        (
            {"state": {0: {"exp_avg": fc}, 1: {}}},
            r"exp_avg of .* is \[2, 2\], the parameter \[3, 2",
        ),
        ({"param_groups": [{"params": [0, 1, 2]}]}, "has 3 parameters, the model 2"),
        ({"param_groups": [{}, {}]}, "not of one group"),
        (
            {"param_groups": [{"params": [0]}], "state": {0: {"exp_avg": torch.zeros(11)}}},
            "exp_avg has 11 numbers, the model 10",
        ),
    ):
        with pytest.raises(CheckpointError, match=words + ".*--optimizer drop"):
            named_optimizer({**stored, **change}, model, "m.pt")
