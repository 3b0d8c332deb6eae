"""Missing, truncated, stale and foreign files, and disagreeing ranks: named, never a hang."""

import shutil
from fractions import Fraction

import pytest
import torch
from checkpoint_helpers import Reference, names_in, run_ranks, set_names

from fairseq_tutel.checkpoint import (
    CheckpointError,
    check_shared_directory,
    inspect,
    load_for_rank,
    merge,
    remove_set,
    reshard,
    split_state,
    write_set,
)


@pytest.fixture
def saved(tmp_path):
    """A set of 4 experts on 4 ranks; returns its canonical path."""
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, 4)
    return path


def member(path: str, name: str) -> str:
    return path.replace(".pt", f"-{name}.pt")


def edit(path: str, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def check_error(path: str, *words: str) -> None:
    """Loading fails with a message that has all the words; inspect reports the same message."""
    with pytest.raises(CheckpointError) as caught:
        load_for_rank(path, rank=0, world_size=1)
    report = inspect(path)
    assert not report["consistent"]
    message = str(caught.value)
    assert message in report["problems"] or any(
        message in problem for problem in report["problems"]
    )
    for word in words:
        assert word in message


def test_no_checkpoint_at_all(tmp_path):
    for read in (lambda p: load_for_rank(p, rank=0, world_size=1), inspect):
        with pytest.raises(CheckpointError, match="neither m.pt nor m-shared.pt is in"):
            read(str(tmp_path / "m.pt"))
        with pytest.raises(CheckpointError, match="neither m.pt nor m-shared.pt is in"):
            read(str(tmp_path / "nowhere" / "m-rank-1.pt"))


def test_fsdp_shards_of_metas_code_are_recognised(tmp_path):
    torch.save({}, tmp_path / "checkpoint_last-rank-0-shard0.pt")
    with pytest.raises(CheckpointError, match="rank-0-shard0.pt is a fully-sharded"):
        load_for_rank(str(tmp_path / "checkpoint_last.pt"), rank=0, world_size=1)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_missing_rank_file(saved, lost):
    remove_file(member(saved, f"rank-{lost}"))
    check_error(saved, "1 of 4 rank files missing", f"m-rank-{lost}.pt", "m-shared.pt")


def remove_file(path: str) -> None:
    shutil.move(path, path + ".away")


def test_missing_shared_file(saved):
    remove_file(member(saved, "shared"))
    check_error(saved, "m-shared.pt: missing")


@pytest.mark.parametrize("name", ["shared", "rank-2"])
def test_truncated_file(saved, name):
    with open(member(saved, name), "rb+") as file:
        file.truncate(2000)
    check_error(saved, f"m-{name}.pt: is truncated at 2000 bytes")


def test_stale_rank_file_of_an_earlier_save(saved, tmp_path):
    shutil.copy(member(saved, "rank-1"), tmp_path / "kept")
    Reference(4, seed=1).save(saved, 4)
    shutil.copy(tmp_path / "kept", member(saved, "rank-1"))
    check_error(saved, "m-rank-1.pt: stale or foreign", "m-shared.pt is of save")


def test_rank_files_in_each_others_place(saved, tmp_path):
    shutil.copy(member(saved, "rank-2"), member(saved, "rank-1"))
    check_error(saved, "m-rank-1.pt: foreign file: it was saved as rank file 2 of 4, not as 1 of 4")


def test_rank_file_without_metadata(saved):
    edit(member(saved, "rank-1"), lambda state: state.pop("moe_checkpoint"))
    check_error(saved, "m-rank-1.pt: foreign file: m-rank-1.pt was not saved with m-shared.pt")
    edit(member(saved, "shared"), lambda state: state.pop("moe_checkpoint"))
    check_error(saved, "m-rank-0.pt: foreign file: m-shared.pt was not saved with m-rank-0.pt")


def test_newer_format(saved):
    edit(member(saved, "shared"), lambda s: s["moe_checkpoint"].update(format_version=99))
    check_error(saved, "m-shared.pt: written in checkpoint format 99", "upgrade")


def test_damaged_metadata(saved):
    edit(member(saved, "shared"), lambda s: s["moe_checkpoint"].pop("num_experts"))
    check_error(saved, "m-shared.pt: incomplete 'moe_checkpoint' metadata")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.popitem(), ("m-rank-2.pt", "against", "absent")),
        (lambda m: m.update({next(iter(m)): torch.zeros(2, 2)}), ("m-rank-2.pt", "[2, 2]")),
        (lambda m: m.update({"decoder.x": torch.zeros(2)}), ("m-rank-2.pt", "decoder.x")),
        (lambda m: m.clear(), ("m-rank-2.pt: holds 0 experts, expected 1",)),
    ],
    ids=["parameter-missing", "other-shape", "dense-in-rank-file", "empty"],
)
def test_rank_file_with_wrong_content(saved, change, words):
    edit(member(saved, "rank-2"), lambda state: change(state["model"]))
    check_error(saved, *words)


def test_experts_in_the_shared_file(saved):
    key = "decoder.layers.1.moe_layer.experts.0.fc1.bias"
    edit(member(saved, "shared"), lambda state: state["model"].update({key: torch.zeros(6)}))
    check_error(saved, "m-shared.pt: a shared file cannot hold", key)


def test_optimizer_state_missing_in_a_rank_file(saved):
    edit(member(saved, "rank-3"), lambda state: state.pop("last_optimizer_state"))
    check_error(saved, "m-rank-3.pt: lacks the optimizer state")


def _without_state(expert, *rest):
    """Drops from a rank file what the optimizer keeps for one expert, or a part of it."""

    def change(state):
        named = state["last_optimizer_state"]["named_state"]
        for key in [key for key in named if f"experts.{expert}." in key]:
            if not rest:
                del named[key]
            elif key.endswith(rest[0]):
                del named[key][rest[1]]

    return change


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rest", [(), ("fc1.bias", "exp_avg")], ids=["all", "one-moment"])
def test_optimizer_state_of_one_expert_missing(tmp_path, ranks, rest):
    """Training could not go on from it: whoever reads or inspects it says so, with or without."""
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, ranks)
    last = 4 // ranks - 1
    edit(member(path, f"rank-{ranks - 1}"), _without_state(last, *rest))
    check_error(path, f"m-rank-{ranks - 1}.pt: ", "optimizer state")
    merged = str(tmp_path / "merged.pt")
    Reference(4).save(str(tmp_path / "x.pt"), 1)
    merge(str(tmp_path / "x.pt"), merged, with_optimizer=True)
    edit(merged, _without_state(3, *rest))
    check_error(merged, "merged.pt: ", "optimizer state")


def test_frozen_parameters_have_no_optimizer_state(saved):
    """Of no expert: that is no defect."""

    def freeze(state):
        named = state["last_optimizer_state"]["named_state"]
        for key in [key for key in named if ".fc1." in key]:
            del named[key]

    for rank in range(4):
        edit(member(saved, f"rank-{rank}"), freeze)
    assert inspect(saved)["consistent"]
    loaded = load_for_rank(saved, rank=0, world_size=1)
    assert any(".fc2." in key for key in loaded["last_optimizer_state"]["named_state"])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("entry", ["cfg", "optimizer_history", "extra_state"])
def test_what_fairseq_needs_is_missing(saved, entry, merged):
    path = file = member(saved, "shared")
    if merged:
        path = file = saved.replace("m.pt", "merged.pt")
        merge(saved, path)
    edit(file, lambda state: state.pop(entry))
    check_error(path, f"{file}: lacks {entry}")


def test_entries_of_other_kinds(tmp_path):
    """Whatever stands where, it is loaded or refused by name, and inspection knows it before."""
    saved = str(tmp_path / "m.pt")
    Reference(2, layers=(1,)).save(saved, 2)
    names = ("shared", "rank-1")
    original = {name: torch.load(member(saved, name), weights_only=True) for name in names}
    outcomes = []
    for name in names:
        for where in _places(original[name]):
            for garbage in (7, {5: None}):
                edit(member(saved, name), lambda state, w=where, g=garbage: _put(state, w, g))
                report = inspect(saved)
                try:
                    load_for_rank(saved, rank=0, world_size=1)
                    outcomes.append(True)
                except CheckpointError as error:
                    outcomes.append(False)
                    assert f"m-{name}.pt" in str(error), (where, garbage, error)
                assert report["consistent"] == outcomes[-1], (name, where, garbage)
                torch.save(original[name], member(saved, name))
    assert set(outcomes) == {True, False} and len(outcomes) > 60


def _places(state, depth=2):
    """Paths of keys to each entry that has a name, down to a depth; one of many alike."""
    for key, value in state.items():
        yield (key,)
        if depth and isinstance(value, dict):
            few = dict(list(value.items())[-1:]) if key in ("model", "named_state") else value
            yield from ((key, *rest) for rest in _places(few, depth - 1))


def _put(state, where, value):
    for key in where[:-1]:
        state = state[key]
    state[where[-1]] = value


def test_superfluous_rank_file_is_reported_but_does_not_disturb(saved):
    shutil.copy(member(saved, "rank-3"), member(saved, "rank-4"))
    Reference(4).check_loadable(saved)
    assert "m-rank-4.pt: superfluous" in inspect(saved)["problems"][0]


def test_merged_file_that_lacks_experts(tmp_path):
    """What stock fairseq leaves of a multi-rank run: rank 0's experts only."""
    state = Reference(4).rank_state(0, 2, with_optimizer=False)
    torch.save(state, tmp_path / "m.pt")
    check_error(str(tmp_path / "m.pt"), "m.pt: holds 2 experts but was written for 4")


def test_ambiguous_name(saved):
    torch.save(Reference(4, seed=5).state(list(range(4))), saved)
    check_error(saved, "ambiguous", "m-shared.pt")
    Reference(4).check_loadable(member(saved, "shared"))


@pytest.mark.parametrize("world_size", [3, 6])
def test_world_size_that_does_not_divide(saved, world_size):
    with pytest.raises(CheckpointError, match=f"m.pt: 4 experts cannot .* {world_size} ranks"):
        load_for_rank(saved, rank=0, world_size=world_size)
    with pytest.raises(CheckpointError, match=f"4 experts cannot .* {world_size} ranks"):
        reshard(saved, saved.replace("m.pt", "x.pt"), world_size)
    assert inspect(saved)["consistent"]


def test_rewriting_never_touches_the_source_and_asks_before_replacing(saved, tmp_path):
    for rewrite in (merge, lambda s, d, **kw: reshard(s, d, 2, **kw)):
        with pytest.raises(CheckpointError, match="is the source itself"):
            rewrite(saved, member(saved, "rank-0"), force=True)
        torch.save({"model": {}}, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match="x.pt: exists .*--force"):
            rewrite(saved, str(tmp_path / "x.pt"))
        rewrite(saved, str(tmp_path / "x.pt"), force=True)
        Reference(4).check_loadable(str(tmp_path / "x.pt"), with_optimizer=rewrite is not merge)
        remove_set(str(tmp_path / "x.pt"))


def test_failed_rewriting_leaves_nothing(saved, tmp_path):
    with open(member(saved, "rank-3"), "rb+") as file:
        file.truncate(2000)
    before = names_in(tmp_path)
    with pytest.raises(CheckpointError, match="m-rank-3.pt: is truncated"):
        reshard(saved, str(tmp_path / "x.pt"), 2)
    assert names_in(tmp_path) == before


# ---- saving ----


def test_one_ranks_error_is_every_ranks_error(tmp_path):
    reference, path = Reference(4), str(tmp_path / "m.pt")
    reference.save(path, 2)

    def save(rank, gather_texts):
        other = Reference(4, seed=1)
        if rank == 1:
            other.stacked[1, "fc1.bias"] = [lambda: None] * 4
        return other.save_rank(path, rank, 2, gather_texts)

    for error in run_ranks(2, save):
        assert isinstance(error, CheckpointError)
        assert "saving " in str(error) and "1 of 2 ranks: rank 1: " in str(error)
    reference.check_loadable(path)
    assert names_in(tmp_path) == set_names("m", 2)


def test_what_could_not_be_loaded_again_is_not_committed(tmp_path):
    """Rank 1 fails after rank 0 has written its files: the old set stays, the new files go."""
    reference, path = Reference(4), str(tmp_path / "m.pt")
    reference.save(path, 2)

    def save(rank, gather_texts):
        shared, rank_state = split_state(Reference(4, seed=1).rank_state(rank, 2))
        rank_state["cfg"] = Fraction(1, 2) if rank == 1 else {}
        return write_set(
            path,
            rank=rank,
            world_size=2,
            shared_state=shared,
            rank_state=rank_state,
            num_rank_files=2,
            gather_texts=gather_texts,
        )

    for error in run_ranks(2, save):
        assert isinstance(error, CheckpointError)
        assert "rank 1: refusing to save" in str(error) and "Fraction" in str(error)
    assert names_in(tmp_path) == set_names("m", 2)
    reference.check_loadable(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_rank_files": 2}, "number of rank files"),
        ({"path": "other.pt"}, "other.pt"),
        ({"rank_state": None}, "rank 1: m-rank-1.pt must be a dict"),
        ({"experts": [2]}, r"same number of experts.*\[2, 1\]"),
    ],
)
def test_ranks_that_disagree_all_fail(tmp_path, arguments, words):
    def save(rank, gather_texts):
        experts = [0, 1] if rank == 0 else arguments.get("experts", [2, 3])
        shared, rank_state = split_state(Reference(4).state(experts))
        call = {"path": "m.pt", "rank_state": rank_state, "num_rank_files": 2}
        if rank == 0 and "num_rank_files" in arguments:
            call["num_rank_files"] = 1
        if rank == 1:
            call |= {key: value for key, value in arguments.items() if key != "experts"}
        call["path"] = str(tmp_path / call["path"])
        return write_set(
            rank=rank, world_size=2, shared_state=shared, gather_texts=gather_texts, **call
        )

    for error in run_ranks(2, save):
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=words):
            raise error
    assert names_in(tmp_path) == set()


def test_ranks_without_a_shared_file_system(tmp_path):
    """Each rank writes on its own disk: rank 0 must notice before anything is replaced."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()

    def save(rank, gather_texts):
        return Reference(4).save_rank(str(tmp_path / str(rank) / "m.pt"), rank, 2, gather_texts)

    for error in run_ranks(2, save):
        assert "m-rank-1.pt" in str(error) and "one shared file system" in str(error)
    assert names_in(tmp_path / "0") == set()


def test_misuse_is_refused(tmp_path):
    shared, rank_state = split_state(Reference(4).state([0, 1, 2, 3]))
    call = {"rank": 0, "world_size": 1, "num_rank_files": 1}
    path = str(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="m-shared.pt must hold only dense parameters"):
        write_set(path, shared_state=rank_state, rank_state=rank_state, **call)
    with pytest.raises(CheckpointError, match="m-rank-0.pt must hold only expert parameters"):
        write_set(path, shared_state=shared, rank_state=shared, **call)
    by_index = shared | {"last_optimizer_state": {"state": {0: {}}, "param_groups": []}}
    with pytest.raises(CheckpointError, match="keyed by parameter name"):
        write_set(path, shared_state=by_index, rank_state=rank_state, **call)
    groups = {"named_state": {}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointError, match="must not list 'params'"):
        split_state(Reference(4).state([0]) | {"last_optimizer_state": groups})
    with pytest.raises(ValueError, match="2 ranks need `gather_texts`"):
        write_set(path, shared_state=None, rank_state=None, rank=0, world_size=2, num_rank_files=2)
    with pytest.raises(ValueError, match="got rank 2 of 2"):
        write_set(path, shared_state=None, rank_state=None, rank=2, world_size=2, num_rank_files=2)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("shared", [True, False])
def test_save_dirs_are_compared_before_training(tmp_path, shared):
    """Relative paths on nodes with other working directories, or disks of their own."""

    def check(rank, gather_texts):
        folder = str(tmp_path / ("all" if shared else f"own-{rank}"))
        check_shared_directory(folder, rank=rank, world_size=3, gather_texts=gather_texts)

    results = run_ranks(3, check)
    if shared:
        assert results == [None] * 3 and not list((tmp_path / "all").iterdir())
        return
    for error in results:
        assert isinstance(error, CheckpointError)
        for words in ("failed on 2 of 3 ranks", f"{tmp_path}/own-1", "is not the save dir of rank"):
            assert words in str(error)
    assert not list((tmp_path / "own-0").iterdir())
