"""What users and other jobs do to the files of a set: it works, or the error says what to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference
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
from fairseq_tutel.checkpoint import reader as reader_module

OLD, NEW = (Reference(4, seed=seed, layers=(1,)) for seed in (1, 2))
RENAME = "for f in last.pt*; do mv $f {}${{f#last}}; done"
# what a user does in the folder of last.pt -> another name, and what it names after the next save
DONE = {
    "mv last.pt* ../other": ("../other/last.pt", OLD),
    "cp last.pt* ../other": ("../other/last.pt", OLD),
    "ln last.pt* ../other": ("../other/last.pt", OLD),
    "ln -s $PWD/last.pt* ../other": ("../other/last.pt", NEW),
    "cp -r . ../copy": ("../copy/last.pt", OLD),
    "ln -s $PWD ../link": ("../link/last.pt", NEW),
    RENAME.format("keep"): ("keep.pt", OLD),
    f"{RENAME.format('named')}; cp named.pt keep.pt": ("keep.pt", OLD),
    f"{RENAME.format('named')}; ln -s $PWD/named.pt ../other/keep.pt": ("../other/keep.pt", OLD),
    "cp last.pt keep.pt": ("keep.pt", OLD),
    "ln last.pt keep.pt": ("keep.pt", OLD),
    "mv last.pt keep.pt": ("keep.pt", OLD),
    "ln -s $PWD/last.pt ../other/keep.pt": ("../other/keep.pt", NEW),
    "cp last.pt ../other": ("../other/last.pt", "is an index without its files"),
}


@pytest.mark.parametrize("command", DONE)
def test_what_users_do_to_files(command, tmp_path):
    run, (other, found) = tmp_path / "run", DONE[command]
    (tmp_path / "other").mkdir()
    OLD.save(str(run / "last.pt"), 2)
    subprocess.run(["bash", "-ec", command], cwd=run, check=True)
    path, other = str(run / "last.pt"), str(run / other)
    for _ in range(2):
        NEW.save(path, 1)
    if isinstance(found, str):
        with pytest.raises(CheckpointError, match=found):
            load_for_rank(other, rank=0, world_size=1)
    else:
        found.check_loadable(other)
    if "link" not in command:  # its folder is the run's
        remove_set(other)
        assert not os.path.lexists(other)
    NEW.check_loadable(path)
    NEW.save(path, 1)
    assert {n for n in names_in(run) if not n.startswith("named")} == set_names("last", 1)


def test_a_copy_has_the_files_of_the_set_that_is_named(tmp_path):
    """Not links to them, nor a merged file beside a set of an earlier form."""
    path = tmp_path / "run" / "m.pt"
    OLD.save(str(path), 2)
    subprocess.run("mkdir ../links; ln -s $PWD/* ../links", shell=True, cwd=path.parent)
    copy_set(str(tmp_path / "links" / "m.pt"), str(tmp_path / "copy.pt"))
    as_earlier(str(path))
    torch.save(NEW.state([0, 1, 2, 3]), path)
    copy_set(str(tmp_path / "run" / "m-shared.pt"), str(tmp_path / "other.pt"))
    shutil.rmtree(path.parent)
    for name in ("copy.pt", "other.pt"):
        OLD.check_loadable(str(tmp_path / name))


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
    NEW.save(path, 1)  # without an index before it, members may be a set whose index was lost
    assert names_in(tmp_path) > set_names("m", 1) | others | {"new"}
    NEW.save(path, 1)
    assert names_in(tmp_path) == set_names("m", 1) | others | {"new"}


def test_an_earlier_version_was_killed_while_it_renamed(tmp_path):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 1)
    as_earlier(path)
    Path(f"{path}.commit").write_text("{}")
    for read in (read_set, inspect, set_exists, find_checkpoint):
        with pytest.raises(CheckpointError, match="m.pt.commit: an earlier version was interr"):
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
    OLD.save(path, 1)

    def gather_texts(text):
        texts.append(text)
        if len(texts) == 2:
            OLD.save(path, 1)
        return [text]

    with pytest.raises(CheckpointError, match="does not see it; .* no other job under this name"):
        NEW.save_rank(path, 0, 1, gather_texts)
    OLD.check_loadable(path)
    assert names_in(tmp_path) == set_names("m", 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_set_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch, count):
    """Before the first, second or third of its files is read; its index has been."""
    path, load, read = str(tmp_path / "m.pt"), reader_module.load_file, []

    def replaced_before(file):
        read.append(file)
        if len(read) == count:
            NEW.save(path, 2)
        return load(file)

    OLD.save(path, 2)
    monkeypatch.setattr(reader_module, "load_file", replaced_before)
    NEW.check_loadable(path)
    assert len(read) == count + 3


def test_files_of_users_and_sets_without_an_index_are_kept(tmp_path):
    """A file of one's own beside X.pt; members whose index was deleted, moved away or renamed."""
    path, own = tmp_path / "m.pt", {"m-rank-0.pt", "m-rank-1.pt"}
    for name in own:
        torch.save({"rng": 1}, tmp_path / name)
    OLD.save(str(path), 1)
    path.rename(tmp_path / "m.pt.bak")
    for _ in range(3):
        NEW.save(str(path), 1)
    assert own <= names_in(tmp_path)
    (tmp_path / "m.pt.bak").rename(path)
    OLD.check_loadable(str(path))
    path.unlink()
    kept = str(next(each for each in tmp_path.glob("m.pt.*-shared.pt")))
    with pytest.raises(CheckpointError, match="is the source itself"):
        merge(kept, str(path))
    NEW.save(str(path), 1)
    assert os.path.exists(kept)
