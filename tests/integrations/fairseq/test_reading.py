"""What fairseq's programs read through the plugin: never code, whichever file it is in."""

import argparse
import collections
import os
import pickle
import shutil
import typing

import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging.meters import AverageMeter
from helpers.inputs import RunsCode
from helpers.sets import as_earlier, member
from omegaconf import OmegaConf

import fairseq_tutel  # noqa: F401  (puts the hooks into place)
from fairseq_tutel.checkpoint import (
    CheckpointError,
    inspect,
    load_for_rank,
    merge,
    reshard,
    save_set,
)
from fairseq_tutel.integrations.fairseq.errors import excepthook
from fairseq_tutel.integrations.fairseq.programs import evaluation
from fairseq_tutel.integrations.fairseq.trainer.sets import start_of_run

UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
EXPERT = "decoder.layers.1.moe_layer.experts.{}.fc1.bias"
GATE = "decoder.layers.1.moe_layer.gate.wg.weight"


class Somebodys:
    """A class that stock fairseq knows nothing of."""


def _state(**more):
    return {
        "args": None,
        "cfg": {"model": {"_name": "transformer_lm"}, "task": {}},
        "model": {"decoder.embed_tokens.weight": torch.arange(6.0).view(2, 3)},
        "optimizer_history": [
            {"num_updates": 3, "optimizer_name": "Adam", "lr_scheduler_state": {"best": None}}
        ],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
        **more,
    }


@pytest.fixture
def saved(tmp_path):
    """The name of a set with two rank files of one expert each, in a folder of its own."""
    experts = {EXPERT.format(n): torch.full((3,), float(n)) for n in (0, 1)}
    state = _state(model={GATE: torch.ones(2, 3), **experts})
    whole, path = str(tmp_path / "whole.pt"), str(tmp_path / "set" / "m.pt")
    save_set(whole, state, num_rank_files=1)
    reshard(whole, path, 2)
    return path


def _read(path):
    """As eval-lm, generate, interactive and from_pretrained do: a file for the path, its state."""
    file = checkpoint_utils.get_maybe_sharded_checkpoint_filename(path, "", 0, 1)
    return checkpoint_utils.load_checkpoint_to_cpu(file)


def _load(path, **kwargs):
    return load_for_rank(path, rank=0, world_size=1, **kwargs)


def _finetune(path):
    """As fairseq-train --finetune-from-model does before it looks for the file."""
    options = {"finetune_from_model": path, "continue_once": None, "restore_file": "x.pt"}
    with start_of_run(OmegaConf.create({"no_save": True, "save_dir": ".", **options})):
        pass


def _refusal(read, *args):
    """The one line that a program ends with, which gives no advice to load unsafely."""
    with pytest.raises(CheckpointError) as caught:
        read(*args)
    text = str(caught.value)
    assert excepthook.explain(caught.value, caught.value.__traceback__) == text
    assert "\n" not in text and "weights_only" not in text and "safe_globals" not in text
    return text


@pytest.mark.parametrize("format", ["zip", "legacy", "plain", "torchscript"])
def test_a_file_that_could_run_code_is_refused_whatever_the_environment_holds(
    format, tmp_path, monkeypatch
):
    monkeypatch.setenv(UNSAFE, "1")
    path, evidence = str(tmp_path / "m.pt"), tmp_path / "ran"
    if format == "torchscript":
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)
        assert _refusal(_read, path).startswith(f"{path}: is a TorchScript archive")
        return
    state = {"model": {}, "x": RunsCode(evidence)}
    if format == "plain":
        with open(path, "wb") as file:
            pickle.dump(state, file, protocol=2)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=format == "zip")
    assert _refusal(_read, path) == (
        f"{path}: holds posix.system, which is not on the list of harmless classes; "
        "refusing to load it, since unpickling it could run code"
    )
    assert not evidence.exists() and os.environ[UNSAFE] == "1"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_dense_checkpoints_are_read_as_ever(zipped, tmp_path):
    """With all that releases of fairseq have put into one."""
    dictionary, meter = Dictionary(), AverageMeter()
    dictionary.add_symbol("word", n=5)
    meter.update(2.5)
    args = argparse.Namespace(arch="transformer_lm", lr=[0.1], task="dummy_lm")
    state = _state(args=args, cfg=None, task_state={"target_dictionary": dictionary})
    old_cfg = OmegaConf.create({"model": {"_name": "transformer_lm", "lr": [0.1], "x": None}})
    state["extra_state"] |= {
        "history": collections.OrderedDict(a=collections.defaultdict(int)), "kind": typing.Any,
        "val_loss": numpy.float64(1.5), "random": numpy.arange(5, dtype=numpy.uint32),
        "old_cfg": old_cfg, "meter": meter,
    }  # fmt: skip
    path = str(tmp_path / "dense.pt")
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    loaded = _read(path)
    assert vars(loaded["args"]) == vars(checkpoint_utils._upgrade_state_dict(state)["args"])
    assert torch.equal(*(s["model"]["decoder.embed_tokens.weight"] for s in (loaded, state)))
    extra = loaded["extra_state"]
    assert extra["val_loss"] == 1.5 and extra["old_cfg"] == old_cfg and extra["meter"].avg == 2.5
    assert (extra["random"] == numpy.arange(5)).all()
    assert extra["history"] == {"a": {}} and extra["kind"] is typing.Any
    assert loaded["task_state"]["target_dictionary"].indices == dictionary.indices


def test_a_class_of_the_user_is_read_where_it_was_allowed(tmp_path):
    path = str(tmp_path / "dense.pt")
    torch.save(_state(task_state={"own": Somebodys()}), path)
    assert "test_reading.Somebodys" in _refusal(_read, path)
    with torch.serialization.safe_globals([Somebodys]):
        assert isinstance(_read(path)["task_state"]["own"], Somebodys)


@pytest.mark.parametrize("content", ["code", "garbage", "half"])
@pytest.mark.parametrize("part", ["shared", "rank-1"])
def test_a_bad_member_of_a_set_is_one_line(part, content, saved, tmp_path):
    file = member(saved, part)
    if content == "code":
        torch.save(_state(x=RunsCode(tmp_path / "ran")), file)
    elif content == "garbage":
        with open(file, "wb") as written:
            written.write(b"PK\x05\x06 no archive" * 100)
    else:
        os.truncate(file, os.path.getsize(file) // 2)
    text = _refusal(_read, saved)
    assert file in text
    assert text in _refusal(lambda: _load(saved, gather_texts=lambda text: [text]))
    assert not (tmp_path / "ran").exists()


def test_programs_agree_about_what_a_name_means(saved, tmp_path):
    """Evaluation and fine-tuning, which look for one file, and whoever reads sets."""
    shared = saved.replace(".pt", "-shared.pt")

    def verdict():
        text = _refusal(_load, saved)
        for read in (_read, evaluation.is_moe_checkpoint, _finetune):
            assert _refusal(read, saved) == text
        assert inspect(saved)["problems"] == [text]
        return text

    merge(saved, str(tmp_path / "merged.pt"))
    as_earlier(saved)
    shutil.copy(tmp_path / "merged.pt", saved)
    assert "ambiguous" in verdict()
    assert _read(shared)["model"].keys() == _load(shared)["model"].keys()
    os.remove(saved)
    os.remove(shared)
    assert f"{shared}: missing" in verdict()
    for rank in (0, 1):
        os.remove(saved.replace(".pt", f"-rank-{rank}.pt"))
    with pytest.raises(FileNotFoundError, match="m.pt; .* holds no checkpoint"):
        checkpoint_utils.get_maybe_sharded_checkpoint_filename(saved, "", 0, 1)
