"""A change that ends at its n-th system call, for every n: the old set or the new one, whole."""

import functools
import io
import os
import threading

import pytest
import torch
from checkpoint_helpers import Reference, run_ranks
from helpers.sets import as_earlier, names_in, set_names

from fairseq_tutel import checkpoint
from fairseq_tutel.checkpoint.growth import grow

OLD, NEW = (Reference(4, seed=seed, layers=(1,)) for seed in (1, 2))
STRUCK = 9


class Alone(BaseException):
    """Ends one rank of several where it stands; a job that ends has no such exception."""


def end_job():
    os._exit(STRUCK)


def fail():
    raise OSError(28, "No space left on device")


def end_rank():
    raise Alone


class Calls:
    """Counts the calls of one thread that change the disk, and strikes at number ``at``."""

    def __init__(self, monkeypatch, at=0, strike=fail):
        self.at, self.strike, self.made = at, strike, []
        self.thread = threading.current_thread()
        for name in ("open", "fsync", "replace", "unlink", "link", "mkdir"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name), name))
        monkeypatch.setattr("builtins.open", self.counted(open, "create"))
        monkeypatch.setattr(torch, "save", self.save)

    def count(self, call, path):
        if threading.current_thread() is self.thread:
            self.made.append((call, os.path.basename(path)))
            if len(self.made) == self.at:
                self.strike()

    def counted(self, operation, name):
        @functools.wraps(operation)
        def call(target, *args, **kwargs):
            if name != "create" or "w" in args[0]:
                at = f"/proc/self/fd/{target}"
                self.count(name, os.readlink(at) if isinstance(target, int) else target)
            return operation(target, *args, **kwargs)

        return call

    def save(self, state, file, whole=torch.save):
        content = io.BytesIO()
        whole(state, content)
        for part in (content.getvalue()[:100], content.getvalue()[100:]):
            self.count("write", file.name)
            file.write(part)
            file.flush()


def save_on(world_size, victim=0):
    """A change for CHANGES: these ranks save, and the victim's calls count."""

    def change(path, watch):
        def work(rank, gather_texts):
            if rank == victim:
                watch()
            return NEW.save_rank(path, rank, world_size, gather_texts if world_size > 1 else None)

        results = run_ranks(world_size, work)
        assert len({type(result) for result in results} - {Alone}) == 1, results  # all fail or none
        if isinstance(results[-1], BaseException):
            raise results[-1]

    return change


def alone(action):
    """A change of one process with NEW beside it, in new/m.pt."""

    def change(path, watch):
        watch()
        action(os.path.join(os.path.dirname(path), "new", "m.pt"), path)

    return change


def old(path):
    OLD.save(path, 2)


def earlier(path):
    checkpoint.remove_set(path)
    old(path)
    as_earlier(path)


def merged(path):
    old(path)
    checkpoint.merge(path, f"{path}_merged.pt", with_optimizer=True)
    os.replace(f"{path}_merged.pt", path)


CHANGES = {
    "save": (old, save_on(1)),
    "save over a merged file": (merged, save_on(1)),
    "save over an earlier form": (earlier, save_on(1)),
    "save on rank 0 of 2": (old, save_on(2)),
    "save on rank 1 of 2": (old, save_on(2, victim=1)),
    "copy": (old, alone(checkpoint.copy_set)),
    "merge": (old, alone(functools.partial(checkpoint.merge, with_optimizer=True, force=True))),
    "grow": (old, alone(lambda _, path: grow(path, path, 8, in_place=True))),
}
# with the mark of those whose steps others have, too
LONG = ("save over a merged file", "save on rank 0 of 2", "merge")
CASES = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CHANGES]
FAILS = [(name, fail) for name in ("save", "save on rank 1 of 2", "copy")]
FAILS += [pytest.param(name, fail, marks=pytest.mark.long) for name in LONG[1:]]


def is_new(path):
    """Whether the checkpoint is the new one; it is whole in either case."""
    state = checkpoint.load_for_rank(path, rank=0, world_size=1)
    if state["moe_checkpoint"]["num_experts"] == 8:
        return checkpoint.inspect(path)["consistent"]
    seed = state["cfg"]["model"]["seed"]
    {1: OLD, 2: NEW}[seed].check_loadable(path)
    return seed == 2


def ended_by_kill(change, path, at):
    """Make a change in a process that ends at call ``at``; return whether it ended there."""
    pid = os.fork()
    if pid == 0:
        with pytest.MonkeyPatch.context() as patches:
            change(path, lambda: Calls(patches, at, end_job))
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, STRUCK)
    return code == STRUCK


@pytest.mark.parametrize("name", CASES)
def test_a_job_is_killed_at_any_call(name, tmp_path):
    prepare, change = CHANGES[name]
    path, outcomes, struck = str(tmp_path / "checkpoint_last.pt"), [], True
    NEW.save(str(tmp_path / "new" / "m.pt"), 1)
    first = 10 if "over" in name else 1  # what was there before does not matter at first
    while struck:
        prepare(path)
        struck = ended_by_kill(change, path, first + len(outcomes))
        outcomes.append(is_new(path))
        for _ in range(1 + (name == "save over an earlier form")):
            old(path)  # a save without X.pt before it leaves what may be a set without its index
        assert names_in(tmp_path) == set_names("checkpoint_last", 2) | {"new"}
    # the index is replaced once; rank 1 has done its part before
    assert outcomes == sorted(outcomes) and outcomes[-1] and outcomes.count(False) > 3
    assert outcomes.count(True) > 2 or "rank 1" in name


@pytest.mark.parametrize(("name", "strike"), [*FAILS, ("save on rank 1 of 2", end_rank)])
def test_a_call_fails(name, strike, tmp_path, monkeypatch):
    """As on a full disk; or one rank alone is killed. All ranks end, and nothing is left."""
    prepare, change = CHANGES[name]
    path, at, calls = str(tmp_path / "checkpoint_last.pt"), 0, []
    NEW.save(str(tmp_path / "new" / "m.pt"), 1)
    while not calls or len(calls[-1].made) >= at:
        at, error = at + 1, None
        prepare(path)
        before = names_in(tmp_path)
        with monkeypatch.context() as patches:
            watch = functools.partial(Calls, patches, at, strike)
            try:
                change(path, lambda watch=watch: calls.append(watch()))
            except (checkpoint.CheckpointError, OSError, Alone) as failure:
                error = failure
        saved = is_new(path)
        assert saved == (error is None or "saved, but" in str(error)), error
        assert saved or names_in(tmp_path) == before
    assert at > 4


def test_a_removal_is_killed_at_any_call(tmp_path):
    """Until all files are gone the set is listed, so that the next removal ends it."""
    path, struck, at = str(tmp_path / "checkpoint_1_100.pt"), True, 0
    while struck:
        at += 1
        old(path)
        struck = ended_by_kill(alone(lambda _, path: checkpoint.remove_set(path)), path, at)
        listed = [*checkpoint.find_sets(str(tmp_path), r"checkpoint_\d+_(\d+)\.pt")]
        assert listed == [path] * bool(os.listdir(tmp_path))
        checkpoint.remove_set(path)
        assert not os.listdir(tmp_path)
    assert at == 5


def test_order_on_the_disk(tmp_path, monkeypatch):
    """A loss of power, unlike a kill, loses what was not forced to the disk."""
    path = tmp_path / "m.pt"
    OLD.save(str(path), 1)
    with monkeypatch.context() as patches:
        made = Calls(patches).made
        NEW.save_rank(str(path), 0, 1, None)
    (commit,) = (number for number, (call, _) in enumerate(made) if call == "replace")
    forced = [name for call, name in made[:commit] if call == "fsync"]
    created = {name for call, name in made[:commit] if call == "create"}
    assert len(created) == 3 and {*forced[:-1]} == created and forced[-1] == tmp_path.name
    last_write = max(number for number, (call, _) in enumerate(made) if call == "write")
    assert last_write < made.index(("fsync", forced[-2])) < commit
    after = [call for call, _ in made[commit + 1 :]]
    assert after == ["open", "fsync", "unlink", "unlink"]
