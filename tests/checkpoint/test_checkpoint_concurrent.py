"""Reading next to a save: nothing is touched, nothing is mixed, nothing foreign is obeyed."""

import threading
import time

import pytest
import torch
from checkpoint_helpers import Reference, expert_name, names_in, set_names
from sabotage import Killed, Saboteur, attempt

from fairseq_tutel.checkpoint import (
    CheckpointError,
    inspect,
    load_for_rank,
    merge,
    recover_directory,
)

OLD, NEW = (Reference(4, seed=seed) for seed in (1, 2))


def test_reading_writes_nothing(tmp_path, monkeypatch):
    """A job that evaluates must not tidy up the save that another job has under way."""
    path = str(tmp_path / "m.pt")
    OLD.save(path, 2)
    with monkeypatch.context() as patches:
        killer = Saboteur(patches, 4, Killed)
        assert isinstance(attempt(killer, lambda: NEW.save_rank(path, 0, 1, None)), Killed)
    before = names_in(tmp_path)
    assert any(name.endswith(".tmp") for name in before)
    OLD.check_loadable(path)
    inspect(path)
    merge(path, str(tmp_path / "elsewhere" / "one.pt"))
    assert names_in(tmp_path) == before | {"elsewhere"}


def test_reading_while_it_is_replaced_gives_one_whole_set(tmp_path):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 2)
    done = threading.Event()
    problems, reads = [], []

    def read():
        while not done.is_set():
            try:
                state = load_for_rank(path, rank=0, world_size=1)
            except CheckpointError as error:
                problems.append(error)
                continue
            seed = state["cfg"]["model"]["seed"]
            reads.append(seed)
            key = expert_name(3, 3, "fc1.weight")
            if not torch.equal(state["model"][key], {1: OLD, 2: NEW}[seed].model[key]):
                problems.append(f"mixed set at seed {seed}")

    reader = threading.Thread(target=read)
    reader.start()
    saves = 0
    while saves < 40 or not (problems or set(reads) == {1, 2}):
        (NEW, OLD)[saves % 2].save(path, 2)
        saves += 1
        time.sleep(0.005)
    done.set()
    reader.join(timeout=30)
    assert not problems and set(reads) == {1, 2}


@pytest.mark.parametrize(
    "record",
    [
        "not json",
        "[]",
        '{"renames": {"../x.pt.0123456789abcdef.tmp": "../x.pt"}, "removals": []}',
        '{"renames": {"m-shared.pt.0123456789abcdef.tmp": "m-rank-0.pt"}, "removals": []}',
        '{"renames": {}, "removals": ["precious.pt"]}',
    ],
)
def test_damaged_or_foreign_record_is_not_obeyed(tmp_path, record):
    path = str(tmp_path / "m.pt")
    OLD.save(path, 1)
    (tmp_path / "m.pt.commit").write_text(record)
    (tmp_path / "precious.pt").write_text("keep me")
    for action in (
        lambda: load_for_rank(path, rank=0, world_size=1),
        lambda: recover_directory(str(tmp_path)),
        lambda: NEW.save_rank(path, 0, 1, None),
    ):
        with pytest.raises(CheckpointError, match="m.pt.commit: (damaged|strange)"):
            action()
    assert names_in(tmp_path) == set_names("m", 1) | {"precious.pt", "m.pt.commit"}
