"""Missing, truncated, stale and foreign files, and disagreeing ranks: named, never a hang."""

import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference, run_ranks
from helpers.sets import as_earlier, member, names_in, set_names

from fairseq_tutel.checkpoint import (
    AllRanks,
    CheckpointError,
    check_shared_directory,
    inspect,
    load_for_rank,
    merge,
    save_set,
    write_set,
)


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, 4)
    return path


def edit(path: str, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def check_error(path: str, *words: str) -> None:
    """Loading fails with a message that has all the words; inspect reports the same message."""
    with pytest.raises(CheckpointError) as caught:
        load_for_rank(path, rank=0, world_size=1)
    message = str(caught.value)
    assert any(message in problem for problem in inspect(path)["problems"])
    assert all(word in message for word in words), message


@pytest.mark.parametrize("earlier", [False, True], ids=["index", "earlier"])
def test_missing_stale_and_exchanged_members(saved, earlier):
    """In a set with an index, and in one of an earlier version or of Meta's code."""
    kept = Path(member(saved, "rank-1")).read_bytes()
    Reference(4, seed=1).save(saved, 4)
    if earlier:
        as_earlier(saved)
    one, two, three, shared = (member(saved, f) for f in ("rank-1", "rank-2", "rank-3", "shared"))
    Path(one).write_bytes(kept)
    check_error(saved, f"{one}: stale or foreign", f"{Path(shared).name} is of save")
    shutil.copy(two, one)
    check_error(saved, f"{one}: foreign file: it was saved as rank file 2 of 4, not as 1 of 4")
    os.remove(three)
    check_error(saved, f"1 of 4 rank files missing: {Path(three).name}", Path(shared).name)
    os.remove(shared)
    check_error(saved, Path(shared).name, "missing" if earlier else "is an index without its files")


def lose(expert, entry=None):
    """Remove what an expert's optimizer state holds, or one entry of it."""

    def change(state):
        named = state["last_optimizer_state"]["named_state"]
        for key in [key for key in named if f"experts.{expert}." in key]:
            named[key].pop(entry) if entry else named.pop(key)

    return change


EXPERT = "decoder.layers.1.moe_layer.experts.0.fc1.bias"
# file, change of its content, words of the error
WRONG = [
    ("shared", lambda s: s.pop("moe_checkpoint"), "-rank-0.pt: stale or for"),
    ("rank-1", lambda s: s.pop("moe_checkpoint"), "-rank-1.pt: stale or"),
    ("shared", lambda s: s["moe_checkpoint"].update(format_version=99),
     "-shared.pt: written in checkpoint format 99, .* upgrade"),
    ("shared", lambda s: s["moe_checkpoint"].pop("num_experts"),
     "-shared.pt: incomplete 'moe_checkpoint' metadata"),
    ("shared", lambda s: s["model"].update({EXPERT: torch.zeros(6)}),
     f"-shared.pt: a shared file cannot hold '{EXPERT}'"),
    ("rank-2", lambda s: s["model"].update(x=torch.zeros(2)), "-rank-2.pt: 'x' is not of an expe"),
    ("rank-2", lambda s: s["model"].popitem(), "-rank-2.pt differs .*: absent against"),
    ("rank-2", lambda s: s["model"].update({EXPERT: torch.zeros(2)}), r"-rank-2.pt.* \[2\] floa"),
    ("rank-2", lambda s: s["model"].clear(), "-rank-2.pt: holds 0 experts, expected 1"),
    ("rank-2", lambda s: s["model"].update({EXPERT.replace(".0.", ".2."): torch.zeros(6)}),
     r"-rank-2.pt: has experts \[0, 2\] but lacks \[1\]"),
    ("rank-3", lambda s: s.pop("last_optimizer_state"), "-rank-3.pt: lacks the optimizer state"),
    # training could not go on from these
    ("rank-3", lose(0), "-rank-3.pt: .*optimizer state"),
    ("rank-3", lose(0, "exp_avg"), "-rank-3.pt: .*optimizer state"),
    ("merged", lose(3), "merged.pt: .*optimizer state"),
    ("merged", lose(3, "exp_avg"), "merged.pt: .*optimizer state"),
    *((file, lambda s, entry=entry: s.pop(entry), f"{file}.pt: lacks {entry}")
      for file in ("shared", "merged") for entry in ("cfg", "optimizer_history", "extra_state")),
    # what stock fairseq leaves of a run of several ranks
    ("merged", lambda s: [s["model"].pop(n) for n in list(s["model"]) if "experts.3." in n],
     "merged.pt: holds 3 experts but was written for 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_a_file_with_wrong_content(saved, name, change, message):
    path = saved
    if name == "merged":
        path = merge(saved, saved.replace("m.pt", "merged.pt"), with_optimizer=True)
    edit(path if name == "merged" else member(saved, name), change)
    with pytest.raises(CheckpointError, match=message):
        load_for_rank(path, rank=0, world_size=1)
    assert any(re.search(message, problem) for problem in inspect(path)["problems"])


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
                    assert f"-{name}.pt" in str(error), (where, garbage, error)
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


def test_superfluous_rank_files_do_not_disturb_and_ambiguous_names_do(saved):
    shutil.copy(last := member(saved, "rank-3"), last.replace("rank-3", "rank-4"))
    Reference(4).check_loadable(saved)
    assert "-rank-4.pt: superfluous" in inspect(saved)["problems"][0]
    as_earlier(saved)
    torch.save(Reference(4, seed=5).state(list(range(4))), saved)
    check_error(saved, "ambiguous", "m-shared.pt")
    Reference(4).check_loadable(member(saved, "shared"))
    for world_size in (3, 6):
        with pytest.raises(CheckpointError, match=f"4 experts cannot .* {world_size} ranks"):
            load_for_rank(member(saved, "shared"), rank=0, world_size=world_size)


# how rank 1 of two differs in a save -> words of the error, on both
DISAGREE = [
    ({"num_rank_files": 1}, "number of rank files"),
    ({"path": "other.pt"}, "other.pt"),
    ({"state": None}, "rank 1: a state must be a dict"),
    ({"state": Reference(4).state([2])}, r"experts of a rank.* 2\], rank 1 has .* 1\]"),
    # after rank 0 has written its files
    ({"state": Reference(4).rank_state(1, 2) | {"cfg": Fraction(1, 2)}},
     "1 of 2 ranks: rank 1: refusing to save.*Fraction"),
    # each rank has a disk of its own
    ({"path": "disk/m.pt"}, "-rank-1.pt.*one shared file system"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), DISAGREE, ids=[row[1] for row in DISAGREE])
def test_ranks_that_disagree_all_fail_and_change_nothing(tmp_path, arguments, words):
    reference, path = Reference(4), str(tmp_path / "m.pt")
    reference.save(path, 2)

    def save(rank, gather_texts):
        own = arguments.get("path") if rank else None
        if own == "disk/m.pt":  # under the same name
            (tmp_path / "disk").mkdir()
        call = {"path": own or "m.pt", "state": Reference(4, seed=1).rank_state(rank, 2)}
        call |= {"num_rank_files": 2} | (arguments if rank else {})
        call["path"] = str(tmp_path / call["path"])
        return save_set(ranks=AllRanks(rank, 2, gather_texts), **call)

    for error in run_ranks(2, save):
        assert isinstance(error, CheckpointError) and re.search(words, str(error)), error
    assert names_in(tmp_path) - {"disk"} == set_names("m", 2)
    reference.check_loadable(path)


def test_misuse_is_refused(tmp_path):
    path, state = str(tmp_path / "m.pt"), Reference(4).state([0, 1, 2, 3])
    for optimizer in (
        {"state": {0: {}}, "param_groups": []},
        {"named_state": {}, "param_groups": [{"params": [0]}]},
    ):
        with pytest.raises(CheckpointError, match="keyed by parameter name, .* without 'params'"):
            save_set(path, state | {"last_optimizer_state": optimizer}, num_rank_files=1)
    for rank, gather_texts in ((0, None), (2, lambda text: [text] * 2)):
        with pytest.raises(ValueError, match=f"rank {rank} of 2: ranks .* need `gather_texts`"):
            AllRanks(rank, 2, gather_texts)

    def experts(wanted):
        raise ValueError("no such expert")

    with pytest.raises(ValueError, match="no such expert"):  # of a program of one's own
        write_set(path, {"model": {}}, experts, num_experts=2, num_ranks=2)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("shared", [True, False])
def test_save_dirs_are_compared_before_training(tmp_path, shared):
    """Relative paths on nodes with other working directories, or disks of their own."""

    def check(rank, gather_texts):
        folder = str(tmp_path / ("all" if shared else f"own-{rank}"))
        check_shared_directory(folder, ranks=AllRanks(rank, 3, gather_texts))

    results = run_ranks(3, check)
    if shared:
        assert results == [None] * 3 and not list((tmp_path / "all").iterdir())
        return
    for error in results:
        assert isinstance(error, CheckpointError)
        for words in ("failed on 2 of 3 ranks", f"{tmp_path}/own-1", "is not the save dir of rank"):
            assert words in str(error)
    assert not list((tmp_path / "own-0").iterdir())
