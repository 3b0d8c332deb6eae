"""What users and other jobs do to the files of a set: it works, or the error says what to do."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference, expert_name, run_ranks
from helpers.sets import as_earlier, names_in, set_names

from fairseq_tutel.checkpoint import (
    CheckpointError,
    copy_set,
    find_checkpoint,
    find_sets,
    inspect,
    load_for_rank,
    merge,
    read_set,
    remove_set,
    set_exists,
)

OLD, NEW = (Reference(4, seed=seed, layers=(1,)) for seed in (1, 2))


def each(action):
    """Do something to each file of run/last.pt, and its name in another folder."""

    def do(run):
        (run.parent / "other").mkdir()
        for file in run.glob("last.pt*"):
            action(file, run.parent / "other" / file.name)
        return run.parent / "other" / "last.pt"

    return do


def rename_all(run):
    for file in run.glob("last.pt*"):
        file.rename(run / file.name.replace("last.pt", "keep.pt"))
    return run / "keep.pt"


def with_index(action, name):
    """Do something to the index alone, and a name for it, from the folder."""

    def do(run):
        action(run / "last.pt", run / name)
        return run / name

    return do


def whole(action, name):
    def do(run):
        action(run, run.parent / name)
        return run.parent / name / "last.pt"

    return do


# what users do, and the set that they read then, after the next save of the run
DONE = {
    "mv last.pt* other": (each(shutil.move), OLD),
    "cp last.pt* other": (each(shutil.copy), OLD),
    "ln last.pt* other": (each(os.link), OLD),
    "ln -s last.pt* other": (each(os.symlink), NEW),
    "rename last keep last.pt*": (rename_all, OLD),
    "cp -r run other": (whole(shutil.copytree, "other"), OLD),
    "ln -s run other": (whole(os.symlink, "other"), NEW),
    "mv run other": (whole(shutil.move, "other"), OLD),
    "cp last.pt keep.pt": (with_index(shutil.copy, "keep.pt"), OLD),
    "ln last.pt keep.pt": (with_index(os.link, "keep.pt"), OLD),
    "mv last.pt keep.pt": (with_index(shutil.move, "keep.pt"), OLD),
    "ln -s run/last.pt keep.pt": (with_index(os.symlink, "../keep.pt"), NEW),
    "cp last.pt ../keep.pt": (with_index(shutil.copy, "../keep.pt"), "is an index without its"),
}


@pytest.mark.parametrize("command", DONE)
def test_what_users_do_to_files(command, tmp_path):
    run, (do, found) = tmp_path / "run", DONE[command]
    OLD.save(str(run / "last.pt"), 2)
    other = str(do(run))
    for _ in range(2):
        NEW.save(str(run / "last.pt"), 1)
    if isinstance(found, str):
        with pytest.raises(CheckpointError, match=found):
            load_for_rank(other, rank=0, world_size=1)
    else:
        found.check_loadable(other)
    # removing the other one removes nothing of the run's, and what only that one named
    if command != "ln -s run other":
        remove_set(other)
    NEW.check_loadable(str(run / "last.pt"))
    NEW.save(str(run / "last.pt"), 1)
    assert names_in(run) == set_names("last", 1)
    assert not os.path.exists(other) or command == "ln -s run other"


def test_only_a_save_removes_what_is_left_of_its_own_name(tmp_path):
    """Readers, and saves under other names, touch nothing."""
    path, number = str(tmp_path / "m.pt"), "0123456789abcdef"
    OLD.save(path, 2)
    as_earlier(path)
    mine = {f"m.pt.{number}-rank-7.pt", f"m.pt.{number}.pt", f"m-rank-0.pt.{number}.tmp"}
    others = {f"x{name}" for name in mine} | {"m.pt.txt", f"m.pt.{number}-x.pt", "m-shared.pt.bak"}
    for name in mine | others:
        (tmp_path / name).touch()
    before = names_in(tmp_path)
    OLD.check_loadable(path)
    assert inspect(path)["consistent"]
    merge(path, str(tmp_path / "new" / "one.pt"))
    copy_set(path, str(tmp_path / "new" / "two.pt"))
    NEW.save(str(tmp_path / "new" / "m.pt"), 1)
    assert names_in(tmp_path) == before | {"new"}
    assert set(find_sets(str(tmp_path), r"[^x.]+\.pt")) == {path}
    NEW.save(path, 1)
    assert names_in(tmp_path) == set_names("m", 1) | others | {"new"}


def test_an_earlier_version_was_killed_while_it_renamed(tmp_path):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 1)
    as_earlier(path)
    Path(f"{path}.commit").write_text("{}")
    for read in (read_set, inspect, set_exists, find_checkpoint):
        with pytest.raises(
            CheckpointError, match="m.pt.commit: an earlier version was interrupted"
        ):
            read(path)
    NEW.save(path, 1)
    NEW.check_loadable(path)
    assert names_in(tmp_path) == set_names("m", 1)


@pytest.mark.parametrize("names", [3, [], [3], ["x"], ["../m.pt.0123456789abcdef-shared.pt"]])
def test_a_damaged_index_is_named_and_replaced(tmp_path, names):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 1)
    torch.save({"moe_members": names}, path)
    with pytest.raises(CheckpointError, match="m.pt: is a damaged index"):
        read_set(path)
    assert "m.pt: is a damaged index" in inspect(path)["problems"][0]
    NEW.save(path, 1)
    NEW.check_loadable(path)
    assert names_in(tmp_path) == set_names("m", 1)


def test_two_jobs_that_save_under_one_name(tmp_path):
    """One of them saves while the other has written its files, and has not committed them."""
    path, texts = str(tmp_path / "m.pt"), []

    def gather_texts(text):
        texts.append(text)
        if len(texts) == 2:
            OLD.save(path, 1)
        return [text]

    with pytest.raises(CheckpointError, match="does not see it; .* no other job under this name"):
        NEW.save_rank(path, 0, 1, gather_texts)
    OLD.check_loadable(path)
    assert names_in(tmp_path) == set_names("m", 1)


def test_reading_while_it_is_replaced_gives_one_whole_set(tmp_path):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 2)
    done, reads = threading.Event(), set()

    def read():
        while not done.is_set():
            state = load_for_rank(path, rank=0, world_size=1)
            seed = state["cfg"]["model"]["seed"]
            key = expert_name(1, 3, "fc1.weight")
            assert torch.equal(state["model"][key], {1: OLD, 2: NEW}[seed].model[key])
            assert find_checkpoint(path) == ("set", path)
            reads.add(seed)

    def save():
        try:
            for number in range(400):
                (NEW, OLD)[number % 2].save(path, 2)
                if number > 40 and reads == {1, 2}:
                    break
        finally:
            done.set()

    assert run_ranks(2, lambda rank, gather_texts: (read, save)[rank]()) == [None, None]
    assert reads == {1, 2}
