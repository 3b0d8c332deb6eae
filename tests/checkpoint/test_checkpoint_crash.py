"""A save that fails or is killed at its n-th file operation, for every n: before the commit record
is renamed into place the complete old set must be there, afterwards the complete new one."""

import os

import pytest
from checkpoint_helpers import Reference, names_in, run_ranks, set_names
from sabotage import Killed, Saboteur, attempt, interrupt_everywhere

from fairseq_tutel.checkpoint import (
    copy_set,
    find_sets,
    inspect,
    merge,
    recover_directory,
    remove_set,
    set_exists,
)

OLD, NEW = (Reference(4, seed=seed, layers=(1,)) for seed in (1, 2))


def check_after(path: str, committed: bool) -> None:
    """The set as readers see it, before and after recovery, and no litter after it."""
    expected = NEW if committed else OLD
    expected.check_loadable(path)
    assert inspect(path)["consistent"]
    recover_directory(os.path.dirname(path))
    expected.check_loadable(path, (2,))
    assert not [name for name in names_in(os.path.dirname(path)) if not name.endswith(".pt")]


def saves_alone(path):
    """A change for ``interrupt_everywhere``: one rank saves."""
    return lambda saboteur: attempt(saboteur, lambda: NEW.save_rank(path, 0, 1, None))


# what was there before and must go: more rank files than the new set has; a merged file
@pytest.mark.parametrize("before", [4, "merged"])
@pytest.mark.parametrize("interruption", [OSError, Killed])
def test_save_on_one_rank(tmp_path, monkeypatch, before, interruption):
    path = str(tmp_path / "checkpoint_last.pt")

    def prepare():
        remove_set(path)
        if before == "merged":
            OLD.save(str(tmp_path / "other.pt"), 1)
            merge(str(tmp_path / "other.pt"), path, with_optimizer=True)
            remove_set(str(tmp_path / "other.pt"))
        else:
            OLD.save(path, before)

    def check(saboteur):
        check_after(path, saboteur.committed)
        files = set_names("checkpoint_last", 1 if saboteur.committed else 4)
        if before == "merged" and not saboteur.committed:
            files = {"checkpoint_last.pt"}
        assert names_in(tmp_path) == files

    interrupt_everywhere(monkeypatch, interruption, prepare, saves_alone(path), check)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("interruption", [OSError, Killed])
def test_save_on_two_ranks(tmp_path, monkeypatch, victim, interruption):
    path = str(tmp_path / "checkpoint_last.pt")
    errors = []

    def change(saboteur):
        def work(rank, gather_texts):
            if rank == victim:
                saboteur.watch()
            return NEW.save_rank(path, rank, 2, gather_texts)

        results = run_ranks(2, work)
        errors.append([r for r in results if isinstance(r, BaseException)])
        return errors[-1][0] if errors[-1] else None

    def check(saboteur):
        # an error on one rank is one on both; committed or not is decided by rank 0's record
        assert len(errors[-1]) in (0, 2)
        committed = saboteur.committed or victim == 1 and not errors[-1]
        check_after(path, committed)

    if victim == 0:
        interrupt_everywhere(monkeypatch, interruption, lambda: OLD.save(path, 2), change, check)
        return
    # rank 1 only writes its own file: it can never be struck after the commit
    struck = 0
    for at in range(1, 50):
        OLD.save(path, 2)
        with monkeypatch.context() as patches:
            saboteur = Saboteur(patches, at, interruption)
            change(saboteur)
        check(saboteur)
        if not saboteur.struck:
            break
        struck += bool(errors[-1])
    assert struck >= 2 and not saboteur.struck


@pytest.mark.parametrize("interruption", [OSError, Killed])
def test_copy(tmp_path, monkeypatch, interruption):
    last, best = str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "checkpoint_best.pt")

    def prepare():
        OLD.save(best, 4)
        NEW.save(last, 2)

    def check(saboteur):
        check_after(best, saboteur.committed)
        NEW.check_loadable(last)

    def change(saboteur):
        return attempt(saboteur, lambda: copy_set(last, best))

    # a hard link that fails is replaced by a copy, for each of the 3 files
    survives = 3 if interruption is OSError else 0
    interrupt_everywhere(monkeypatch, interruption, prepare, change, check, survives)


@pytest.mark.parametrize("interruption", [OSError, Killed])
def test_remove(tmp_path, monkeypatch, interruption):
    path = str(tmp_path / "checkpoint_1_100.pt")

    def check(saboteur):
        gone = saboteur.committed
        assert set_exists(path) != gone
        found = [*find_sets(str(tmp_path), r"checkpoint_\d+_(\d+)\.pt")]
        assert found == ([] if gone else [path])
        if not gone:
            OLD.check_loadable(path)
        recover_directory(str(tmp_path))
        assert names_in(tmp_path) == (set() if gone else set_names("checkpoint_1_100", 2))

    def change(saboteur):
        return attempt(saboteur, lambda: remove_set(path))

    interrupt_everywhere(monkeypatch, interruption, lambda: OLD.save(path, 2), change, check)


def test_new_content_is_on_the_disk_before_the_commit(tmp_path, monkeypatch):
    """Power loss, unlike a kill, loses what was not synced: check the order of the operations."""
    events = []

    def name_of(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    def fsync(descriptor):
        events.append(("fsync", name_of(descriptor).split(".pt.")[0]))

    def replace(source, target, rename=os.replace):
        events.append(("replace", os.path.basename(target)))
        rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell which file is synced")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    NEW.save_rank(str(tmp_path / "m.pt"), 0, 1, None)
    directory = ("fsync", tmp_path.name)
    commit = events.index(("replace", "m.pt.commit"))
    assert {("fsync", "m-shared"), ("fsync", "m-rank-0"), directory} <= set(events[:commit])
    assert events[commit - 1] == ("fsync", "m"), "the record's content comes before its name"
    assert events[commit + 1] == directory, "the record's name comes before the renames"
    renamed = {name for kind, name in events[commit + 2 :] if kind == "replace"}
    assert renamed == {"m-shared.pt", "m-rank-0.pt"}


def killed_after_the_commit(monkeypatch, path):
    with monkeypatch.context() as patches:
        assert isinstance(saves_alone(path)(Saboteur(patches, "commit", Killed)), Killed)


def test_recovery_may_itself_be_killed(tmp_path, monkeypatch):
    path = str(tmp_path / "m.pt")
    for at in range(1, 100):
        OLD.save(path, 4)
        killed_after_the_commit(monkeypatch, path)
        assert "m.pt.commit" in names_in(tmp_path)
        with monkeypatch.context() as patches:
            second = Saboteur(patches, at, Killed)
            attempt(second, lambda: recover_directory(str(tmp_path)))
        check_after(path, committed=True)
        assert names_in(tmp_path) == set_names("m", 1)
        if not second.struck:
            break
    assert at > 5


def test_first_save_interrupted_after_its_commit_exists(tmp_path, monkeypatch):
    """No file has its final name yet, but the set is complete: it is listed, loaded, copied."""
    path = str(tmp_path / "checkpoint_1_5.pt")
    killed_after_the_commit(monkeypatch, path)
    assert not [name for name in names_in(tmp_path) if name.endswith(".pt")]
    assert set_exists(path) and inspect(path)["unfinished_save"]
    assert [*find_sets(str(tmp_path), r"checkpoint_\d+_(\d+)\.pt")] == [path]
    NEW.check_loadable(path, (1, 2))
    copy_set(path, str(tmp_path / "best.pt"))
    assert names_in(tmp_path) == set_names("checkpoint_1_5", 1) | set_names("best", 1)
