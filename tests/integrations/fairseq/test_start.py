"""Where runs start from, and that those who only read leave the files of a run alone."""

import logging
import os

import pytest
from fairseq import checkpoint_utils, utils
from helpers.assertions import assert_same_state
from helpers.commands import ROOT
from helpers.sets import as_earlier
from helpers.training import make_config, make_trainer, named, own_batches, save

from fairseq_tutel.checkpoint import merge
from fairseq_tutel.integrations.fairseq.programs import evaluation


def _config(folder, *options):
    return make_config("--moe-expert-count", "4", "--save-dir", str(folder), *options)


def _trained(folder, updates=2):
    trainer = make_trainer(_config(folder))
    for update in range(updates):
        trainer.train_step(own_batches(update, 1))
    return trainer


def _save(trainer, path, state="complete"):
    """Save a set, or one that an earlier version would have saved, or a merged file."""
    save(trainer, path if state != "merged" else path.with_stem("set"), 0)
    if state == "merged":
        merge(str(path.with_stem("set")), str(path))
    if state == "earlier":
        as_earlier(str(path))


def _start(folder, *options):
    """The trainer of a run that starts as fairseq-train does, and its checkpoint options."""
    trainer = make_trainer(_config(folder, *options))
    trainer.get_train_iterator = lambda epoch, load_dataset, **kwargs: _Iterator()
    checkpoint_utils.load_checkpoint(trainer.cfg.checkpoint, trainer)
    return trainer


class _Iterator:
    epoch = 1

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("state", ["complete", "earlier"])
def test_finetuning_starts_from_a_set_by_its_name(state, tmp_path):
    run, path = _trained(tmp_path), tmp_path / "pretrained" / "model.pt"
    _save(run, path, state)
    trainer = _start(tmp_path / "run", "--finetune-from-model", str(path))
    assert trainer.get_num_updates() == 0
    assert_same_state(named(trainer), named(run))
    assert trainer.cfg.checkpoint.finetune_from_model == str(path)  # as the user gave it
    with pytest.raises(ValueError, match="nowhere.pt does not exist"):
        _start(tmp_path / "run", "--finetune-from-model", str(tmp_path / "nowhere.pt"))


@pytest.mark.parametrize("option, state", [
    ("--continue-once", "complete"), ("--finetune-from-model", "earlier"),
    ("--finetune-from-model", "merged"),
])  # fmt: skip
def test_a_run_that_has_saved_goes_on(option, state, tmp_path):
    """Whatever its last set looks like; these options are for its first launch."""
    run = _trained(tmp_path / "run", 3)
    _save(run, tmp_path / "run" / "checkpoint_last.pt", state)
    trainer = _start(tmp_path / "run", option, str(tmp_path / "pretrained" / "model.pt"))
    assert trainer.get_num_updates() == (0 if state == "merged" else 3)  # merged: weights only
    assert_same_state(named(trainer), named(run))


@pytest.fixture
def saved(tmp_path):
    """(trainer, names of files) of a set beside a file of a save under way."""
    trainer = _trained(tmp_path)
    save(trainer, tmp_path / "checkpoint_last.pt", 0)
    (tmp_path / "checkpoint_last.pt.0123456789abcdef-rank-0.pt").touch()
    return trainer, sorted(os.listdir(tmp_path))


def test_readers_change_nothing(saved, tmp_path, monkeypatch):
    """Evaluation may look at a set that another job is saving."""
    path = str(tmp_path / "checkpoint_last.pt")
    monkeypatch.setattr(os, "replace", lambda *args: pytest.fail("a reader renames"))
    monkeypatch.setattr(os, "unlink", lambda *args: pytest.fail("a reader removes"))
    assert evaluation.is_moe_checkpoint(path)
    file = checkpoint_utils.get_maybe_sharded_checkpoint_filename(path, "", 0, 1)
    assert os.path.exists(file)  # fairseq looks
    state = checkpoint_utils.load_checkpoint_to_cpu(file)
    assert set(saved[0].get_model().state_dict()) <= set(state["model"]) | {"decoder.version"}
    assert sorted(os.listdir(tmp_path)) == saved[1]


def test_the_user_dir_may_be_imported_already(monkeypatch):
    """By a script, or by a notebook that goes on with fairseq's own functions."""
    monkeypatch.chdir(ROOT)
    for written in ("fairseq_tutel", str(ROOT / "fairseq_tutel")):
        utils.import_user_module(type("Options", (), {"user_dir": written}))


def test_a_run_that_saves_nothing_leaves_the_folder_alone(saved, tmp_path):
    """It may be that of a run that is saving."""
    assert _start(tmp_path, "--no-save").get_num_updates() == 2
    assert sorted(os.listdir(tmp_path)) == saved[1]


def test_a_simulated_rank_starts_afresh(saved, tmp_path, monkeypatch):
    """It holds a share of the experts; a real run may have saved under the same name."""
    # it labels every line that the process logs from then on
    monkeypatch.setattr(logging, "setLogRecordFactory", lambda factory: None)
    assert _start(tmp_path, "--moe-benchmark", "simulate_world_size=4").get_num_updates() == 0
