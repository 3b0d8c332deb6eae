"""Saved at any number of ranks, loaded, resharded and merged at any other: the same bits."""

import os
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference, expert_name, run_ranks
from helpers.assertions import assert_same_state
from helpers.sets import member, names_in, set_names

from fairseq_tutel.checkpoint import (
    AllRanks,
    CheckpointError,
    copy_set,
    find_sets,
    inspect,
    load_file,
    load_for_rank,
    merge,
    remove_set,
    reshard,
    set_exists,
)
from fairseq_tutel.checkpoint.state import split_state

WORLD_SIZES = (1, 2, 4)
BEST = "checkpoint.best_loss_4.1230"  # a name of fairseq's, with a dot and a metric


def load_on_two_ranks(*paths):
    """What rank r of two gets from ``paths[r]``, or the error that it gets."""
    how = {"world_size": 2}
    return run_ranks(2, lambda r, g: load_for_rank(paths[r], rank=r, gather_texts=g, **how))


@pytest.mark.parametrize(("num_experts", "world_size"), [(2, 4), (4, 1), (4, 4), (8, 2)])
def test_save_then_load_at_any_world_size(tmp_path, num_experts, world_size):
    reference, path = Reference(num_experts), str(tmp_path / "new" / f"{BEST}.pt")
    reference.save(path, world_size)
    files = min(num_experts, world_size)
    assert names_in(tmp_path / "new") == set_names(BEST, files)
    reference.check_loadable(path, WORLD_SIZES)
    # any member names the set, also by the name that it had in earlier versions
    for name in ("shared", f"rank-{files - 1}"):
        reference.check_loadable(member(path, name))
        reference.check_loadable(path.replace(".pt", f"-{name}.pt"))


def test_files_have_metas_layout(tmp_path):
    """Dense parameters once, experts numbered from 0 in each rank file; read without our code."""
    reference = Reference(4)
    path = str(tmp_path / "m.pt")
    reference.save(path, 2)
    index = torch.load(path, weights_only=True)  # as a tool does that knows of no sets
    files = [member(path, name) for name in ("shared", "rank-0", "rank-1")]
    assert index["moe_members"] == [os.path.basename(file) for file in files]
    assert "index of a checkpoint in several files" in index["about"]
    shared = torch.load(files[0], weights_only=True)
    assert_same_state(shared["model"], reference.state([], with_optimizer=False)["model"])
    rank_1 = torch.load(files[2], weights_only=True)
    assert len(rank_1["model"]) == 2 * 4 * 2
    for j in (0, 1):
        stored = rank_1["model"][expert_name(3, j, "fc1.weight")]
        assert torch.equal(stored, reference.model[expert_name(3, 2 + j, "fc1.weight")])
    # the common entries are in both, as in Meta's files
    assert rank_1["cfg"] == shared["cfg"] and rank_1["extra_state"] == shared["extra_state"]
    assert set(rank_1["last_optimizer_state"]) == {"named_state"}
    assert set(rank_1["last_optimizer_state"]["named_state"]) == set(rank_1["model"])


@pytest.mark.parametrize("num_experts", [2, 8])
def test_reshard_and_merge_and_back_is_the_identity(tmp_path, num_experts):
    reference = Reference(num_experts)
    first = str(tmp_path / "first.pt")
    reference.save(first, 2)
    up, one, merged = (str(tmp_path / f"{name}.pt") for name in ("up", "one", "merged"))
    assert reshard(first, up, 4) == up
    assert reshard(up, one, 1) == one
    assert merge(one, merged, with_optimizer=True) == merged
    assert reshard(merged, str(tmp_path / "back.pt"), 2)
    assert set_names("up", min(4, num_experts)) <= names_in(tmp_path)
    for path in (up, one, merged, str(tmp_path / "back.pt")):
        reference.check_loadable(path, WORLD_SIZES)
    for name in ("shared", "rank-0", "rank-1"):
        before = load_file(member(first, name))
        after = load_file(member(str(tmp_path / "back.pt"), name))
        assert before["moe_checkpoint"].pop("save_id") != after["moe_checkpoint"].pop("save_id")
        assert_same_state(after, before, name)
    # the source was only read
    reference.check_loadable(first, WORLD_SIZES)


def test_merged_file_numbers_experts_globally_and_leaves_the_optimizer_out(tmp_path):
    reference = Reference(4)
    reference.save(str(tmp_path / "m.pt"), 4)
    merge(str(tmp_path / "m.pt"), str(tmp_path / "one.pt"))
    stored = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same_state(stored["model"], reference.model)
    assert "last_optimizer_state" not in stored
    reference.check_loadable(str(tmp_path / "one.pt"), (1, 2), with_optimizer=False)
    with pytest.raises(CheckpointError, match="one.pt: has no optimizer state"):
        merge(str(tmp_path / "one.pt"), str(tmp_path / "two.pt"), with_optimizer=True)


def test_dense_checkpoint_without_experts_loads_everywhere(tmp_path):
    state = {"model": {"decoder.w": torch.randn(3)}, "cfg": {}, "last_optimizer_state": {"s": 1}}
    torch.save(state, tmp_path / "dense.pt")
    for rank in range(3):
        loaded = load_for_rank(str(tmp_path / "dense.pt"), rank=rank, world_size=3)
        assert_same_state(loaded["model"], state["model"])
        assert "last_optimizer_state" not in loaded and loaded["moe_checkpoint"] is None
    with pytest.raises(CheckpointError, match="has no experts"):
        reshard(str(tmp_path / "dense.pt"), str(tmp_path / "x.pt"), 2)


def test_load_together_reads_what_each_rank_needs_only(tmp_path):
    reference, paths = Reference(4), [str(tmp_path / f"{name}.pt") for name in "ab"]
    for path in paths:
        reference.save(path, 4)
    # as when the set is replaced after rank 0 has read it and before rank 1 has
    for error in load_on_two_ranks(*paths):
        assert isinstance(error, CheckpointError) and "ranks read different saves" in str(error)
    Path(member(path, "rank-3")).write_bytes(b"broken, but only rank 1 of 2 needs it")
    alone = load_for_rank(path, rank=0, world_size=2)
    assert_same_state(alone["model"], reference.rank_state(0, 2)["model"])
    for error in load_on_two_ranks(path, path):  # rank 0 fails too, instead of waiting later
        assert isinstance(error, CheckpointError) and "1 of 2 ranks: rank 1: " in str(error)
        assert "-rank-3.pt" in str(error)


def test_copy_is_independent_of_the_original(tmp_path):
    # one name begins with the other
    last, best = str(tmp_path / "checkpoint_1_10.pt"), str(tmp_path / "checkpoint_1_100.pt")
    old, new = Reference(4, seed=1), Reference(4, seed=2)
    with pytest.raises(CheckpointError, match="1_10.pt: no such checkpoint"):
        copy_set(last, best)
    new.save(best, 4)  # what was there before, with more ranks
    old.save(last, 2)
    run_ranks(2, lambda rank, gather: copy_set(last, best, ranks=AllRanks(rank, 2, gather)))
    copy_set(last, best)
    copy_set(last, last.replace(".pt", "-shared.pt"))  # the same set by its earlier form's name
    expected = set_names("checkpoint_1_10", 2) | set_names("checkpoint_1_100", 2)
    assert names_in(tmp_path) == expected
    assert os.path.samefile(member(last, "rank-1"), member(best, "rank-1"))
    new.save(last, 2)
    old.check_loadable(best, (1, 2))
    new.check_loadable(last, (1, 2))
    merge(last, str(tmp_path / "m.pt"), with_optimizer=True)
    for _ in range(2):  # again: both names are now links to one file, which rename() ignores
        copy_set(str(tmp_path / "m.pt"), best)
    new.check_loadable(best)
    merged = {"m.pt", "checkpoint_1_100.pt"}
    assert names_in(tmp_path) == expected - set_names("checkpoint_1_100", 2) | merged


def test_gate_rows_of_null_experts_are_no_experts(tmp_path):
    """Files without our marks: as many experts as the gates have rows, but for these."""
    reference = Reference(4)
    for name in reference.model:
        if ".gate." in name:
            reference.model[name] = torch.cat([reference.model[name], torch.zeros(2, 4)])
    state = reference.state([0, 1, 2, 3], with_optimizer=False)
    state["cfg"] = {"model": {"moe_null_experts": 2}}
    torch.save(state, tmp_path / "merged.pt")
    shared, experts = split_state(state)
    torch.save(shared, tmp_path / "set-shared.pt")
    torch.save(experts, tmp_path / "set-rank-0.pt")
    for name in ("merged.pt", "set.pt"):
        loaded = load_for_rank(str(tmp_path / name), rank=1, world_size=2)["model"]
        first = loaded[expert_name(3, 0, "fc1.weight")]
        assert torch.equal(first, reference.model[expert_name(3, 2, "fc1.weight")])
        assert inspect(str(tmp_path / name))["problems"] == []
    state["model"]["decoder.layers.3.moe_layer.gate.wg.weight"] = torch.zeros(8, 4)
    torch.save(state, tmp_path / "merged.pt")
    with pytest.raises(CheckpointError, match="the MoE layers differ in their number of experts"):
        load_for_rank(str(tmp_path / "merged.pt"), rank=0, world_size=1)


def test_find_and_remove_treat_a_set_as_one_thing(tmp_path):
    for place in ("1_100", "1_20", "1_3", "last"):
        Reference(2).save(str(tmp_path / f"checkpoint_{place}.pt"), 2)
    torch.save({"model": {}}, tmp_path / "checkpoint_2_50.pt")
    found = find_sets(str(tmp_path), r"checkpoint_\d+_(\d+)\.pt")
    names = [str(tmp_path / f"checkpoint_{place}.pt") for place in ("1_100", "2_50", "1_20", "1_3")]
    assert list(found.items()) == list(zip(names, (100.0, 50.0, 20.0, 3.0), strict=True))
    for path in list(found)[1:]:
        remove_set(path)
        assert not set_exists(path)
    assert names_in(tmp_path) == set_names("checkpoint_1_100", 2) | set_names("checkpoint_last", 2)
    for name in ("never_there.pt", "no_folder/never_there.pt"):
        remove_set(str(tmp_path / name))
    # a name that is a prefix of another must not take it along
    (last,) = find_sets(str(tmp_path), r"checkpoint_last\.pt")
    assert last == str(tmp_path / "checkpoint_last.pt")
