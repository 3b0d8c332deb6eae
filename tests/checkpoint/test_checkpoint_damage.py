"""Damaged sources of every command: one line that names the entry, exit code 2, nothing written."""

import copy
import json

import pytest
import torch
from checkpoint_helpers import EXPERT_SHAPES, Reference, expert_name
from helpers.sets import as_earlier, names_in

from fairseq_tutel.checkpoint import reshard
from fairseq_tutel.checkpoint.__main__ import main

LAYER = "decoder.layers.1."
GATE = f"{LAYER}moe_layer.gate.wg.weight"
FC1, FC1_BIAS = (expert_name(1, 0, name) for name in ("fc1.weight", "fc1.bias"))
LORA_A = expert_name(1, 0, "fc1.lora_A")
REMOVED = object()
OTHERS = {"removed": REMOVED, "a number": 7, "text": "text", "a list": [[1, [2]]], "none": None}
TENSORS = {
    "sparse": lambda old: old.to_sparse(),
    "scalar": lambda old: torch.tensor(1.0),
    "another shape": lambda old: torch.zeros(3, 5, 2),
    "flat": lambda old: old.flatten() if old.dim() > 1 else old[:, None],
    "a row less": lambda old: old[:-1].clone(),
    "empty": lambda old: old[:0].clone(),
    "complex": lambda old: old.to(torch.complex64),
    "integers": lambda old: old.long(),
    "on the meta device": lambda old: torch.empty_like(old, device="meta"),
}
NO_ROWS = ("sparse", "scalar", "another shape", "a row less", "empty", "on the meta device")
EVERY = ("upcycle d.pt x.pt --num-experts 4", "upcycle e.pt d.pt x.pt --num-experts 4 --shared")
OF_SETS = (
    "merge m.pt x.pt", "reshard m.pt x.pt --ranks 1", "grow m.pt x.pt --num-experts 8",
    "grow m.pt x.pt --num-experts 8 --by load", "shrink m.pt x.pt --num-experts 1",
    "shrink m.pt x.pt --dense", "shrink m.pt x.pt --dense one", "merge-lora m.pt x.pt",
    "inspect m.pt",
)  # fmt: skip
# file, entry, kinds of damage (all if empty), commands that must refuse it
DAMAGE = [
    *(("d.pt", ("model", f"{LAYER}{name}"), (), EVERY) for name in EXPERT_SHAPES),
    ("d.pt", ("optimizer_history", 0, "num_updates"), ("text", "a list"), EVERY),
    ("d.pt", ("optimizer_history", 0, "criterion_name"), ("a number", "a list"), EVERY),
    ("d.pt", ("cfg", "model"), ("a number", "text", "a list"), EVERY),
    ("d.pt", ("model", "decoder.embed_tokens.weight"), ("text", "sparse"), EVERY),
    ("m-shared.pt", ("model", GATE), NO_ROWS, OF_SETS),
    ("m-shared.pt", ("cfg", "model", "moe_null_experts"), ("text", "a list"), OF_SETS),
    ("m-shared.pt", ("cfg", "model", "moe_lora_rank"), ("text", "a list"), OF_SETS),
    ("m-shared.pt", ("cfg", "model", "moe_lora_alpha"), ("text", "a list"), OF_SETS[-2:-1]),
    ("m-shared.pt", ("moe_checkpoint", "save_id"), ("a number", "a list"), OF_SETS),
    ("m-rank-0.pt", ("model", FC1), tuple(TENSORS), OF_SETS),
    ("m-rank-0.pt", ("model", FC1_BIAS), ("removed", "sparse"), OF_SETS),
    ("m-rank-0.pt", ("model", LORA_A), ("removed", "a row less", "integers"), OF_SETS),
    # a rank file of one expert cannot tell a missing tensor from the form of its experts
    ("s-rank-0.pt", ("model", FC1_BIAS), ("removed", "a row less"), ["shrink s.pt x.pt --dense"]),
    ("s-rank-0.pt", ("model", LORA_A), ("removed", "a row less"), ["merge-lora s.pt x.pt"]),
]  # fmt: skip


def dense(seed):
    """A language model of stock fairseq with two layers, as far as the commands read it."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {f"decoder.layers.{n}.{name}": s for n in (0, 1) for name, s in EXPERT_SHAPES.items()}
    shapes["decoder.embed_tokens.weight"] = (10, 4)
    history = {"criterion_name": "CrossEntropyCriterion", "num_updates": 3}
    model = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    cfg = {"model": {"_name": "transformer_lm"}, "criterion": {"_name": "cross_entropy"}}
    return {"cfg": cfg, "model": model, "optimizer_history": [history]}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Dense models, a set with LoRA of two experts, and one of one expert; their contents."""
    folder = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate("de"):
        torch.save(dense(seed), folder / f"{name}.pt")
    for name, num_experts in (("m", 2), ("s", 1)):
        state = Reference(num_experts, layers=(1,)).state([*range(num_experts)])
        options = {"moe_top_k": 1, "moe_null_experts": 0, "moe_lora_rank": 2, "moe_lora_alpha": 4.0}
        state["cfg"]["model"] |= options
        del state["last_optimizer_state"]
        for number in range(num_experts):
            state["model"][expert_name(1, number, "fc1.lora_A")] = torch.ones(2, 4)
            state["model"][expert_name(1, number, "fc1.lora_B")] = torch.ones(6, 2)
        torch.save(state, folder / "plain.pt")
        reshard(str(folder / "plain.pt"), str(folder / f"{name}.pt"), 1)
        (folder / "plain.pt").unlink()
        as_earlier(str(folder / f"{name}.pt"))
    line = {"update": 4, "layers": {"1": [3, 1]}}
    (folder / "expert_load.jsonl").write_text(json.dumps(line) + "\n")
    names = {row[0] for row in DAMAGE}
    return folder, {name: torch.load(folder / name, weights_only=True) for name in names}


def damaged(state, where, how):
    """A copy of a state with one entry that is damaged."""
    state = copy.deepcopy(state)
    place = state
    for key in where[:-1]:
        place = place[key]
    value = OTHERS[how] if how in OTHERS else TENSORS[how](place[where[-1]])
    if value is REMOVED:
        del place[where[-1]]
    else:
        place[where[-1]] = value
    return state


def check_refused(command, folder, capsys, *words):
    """Return nothing if the command ends with one line that has all the words."""
    before = names_in(folder)
    code, (out, err) = main(command.split()), capsys.readouterr()
    line = err if code == 2 else out.rpartition("problem: ")[2]  # inspect prints a table
    assert code == (1 if command.startswith("inspect") and not err else 2), (command, words)
    assert line.count("\n") == 1 and all(word in line for word in words), (command, words, line)
    assert names_in(folder) == before


@pytest.mark.parametrize(
    ("name", "where", "kinds", "commands"), DAMAGE, ids=[f"{r[0]}-{r[1][-1]}" for r in DAMAGE]
)
def test_a_damaged_entry_is_named(sources, capsys, monkeypatch, name, where, kinds, commands):
    folder, states = sources
    monkeypatch.chdir(folder)
    # the prefix may have * for the expert's number; an FFN's weight may fit the other tensors' less
    key = f"{LAYER}fc" if where[-1].startswith(f"{LAYER}fc") else where[-1].rpartition("fc1.")[2]
    try:
        for how in kinds or (*OTHERS, *TENSORS):
            torch.save(damaged(states[name], where, how), name)
            for command in commands:
                check_refused(command, folder, capsys, key)
    finally:
        torch.save(states[name], name)


@pytest.mark.parametrize(
    "layers", [3, [1], {"1": 3}, {"1": "ab"}, {"1": [None, 1]}, {"1": [[1], [2]]}, {"1": [-1, 2]}]
)
def test_a_damaged_log_of_the_load_is_named(sources, capsys, monkeypatch, tmp_path, layers):
    monkeypatch.chdir(sources[0])
    (tmp_path / "load").write_text(json.dumps({"layers": layers}) + "\n")
    for command in ("grow m.pt x.pt --num-experts 4 --by load", "shrink m.pt x.pt --num-experts 1"):
        check_refused(f"{command} --load {tmp_path / 'load'}", sources[0], capsys, "/load: no line")
