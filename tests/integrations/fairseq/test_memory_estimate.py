"""Memory estimate before training, and the error when memory runs out."""

import sys

import pytest
import torch
from helpers import architectures
from helpers.architectures import ROWS
from helpers.training import make_batch, make_config, make_trainer

from fairseq_tutel.integrations.fairseq.errors.excepthook import explain
from fairseq_tutel.integrations.fairseq.trainer import memory
from fairseq_tutel.plan.planner import memory_at_peak

LOGGER = "fairseq_tutel.integrations.fairseq.trainer.memory"


def test_the_planners_count_is_logged_once_and_changes_no_random_number(caplog, monkeypatch):
    trainer = make_trainer(make_config("--moe-expert-count", "4"))
    before = torch.get_rng_state()
    need = trainer.memory_of_step()
    assert torch.equal(torch.get_rng_state(), before)
    params = sum(param.numel() for param in trainer.get_model().parameters())
    assert need.kinds["weights"] == 4 * params
    assert need.kinds["optimizer statistics"] == 8 * params
    assert need.kinds == memory_at_peak(trainer.cfg, 1, len(trainer.task.target_dictionary))
    assert need.needed == sum(need.kinds.values()) - need.kinds["weights"] and need.fits
    with caplog.at_level("INFO", logger=LOGGER):
        for epoch in (1, 2):
            trainer.begin_epoch(epoch)
    (line,) = [record for record in caplog.records if record.name == LOGGER]
    assert line.levelname == "INFO" and "memory estimate: a step needs " in line.getMessage()

    caplog.clear()
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    trainer._memory_logged = False
    with caplog.at_level("INFO", logger=LOGGER):
        trainer.begin_epoch(3)
    assert "does NOT fit" in caplog.text and "--checkpoint-activations; --moe-" in caplog.text


@pytest.mark.parametrize("options", [("--optimizer", "nag"), ("--moe-lora-rank", "2")])
def test_a_run_that_the_planner_does_not_know_says_nothing(options):
    trainer = make_trainer(make_config("--moe-expert-count", "4", *options))
    assert trainer.memory_of_step() is None


@pytest.mark.parametrize("options, helps", [
    ((), "--checkpoint-activations; --moe-activation-memory lean; --moe-expert-placement sliced "
     ".*; --zero-sharding os "),
    (("--moe-activation-memory", "lean"), "-activations; --moe-activation-memory minimal; --"),
    (("--checkpoint-activations", "--zero-sharding", "os"), "what helps: --moe-expert-placement"),
])  # fmt: skip
def test_an_error_is_one_line_with_consumers_and_options(options, helps):
    trainer = make_trainer(make_config("--moe-expert-count", "4", *options))
    trainer.train_step([make_batch(0)])
    trainer.get_model().decoder.layers[1].register_forward_hook(lambda *_: torch.empty(2**55))
    with pytest.raises(torch.OutOfMemoryError, match=helps):
        trainer.train_step([make_batch(1)])
    try:
        trainer.train_step([make_batch(1)])
    except torch.OutOfMemoryError:
        _, error, trace = sys.exc_info()
    line = explain(error, trace)
    assert line.startswith(
        "out of memory (it tried to allocate 134,217,728.0 GiB): the largest are "
    )
    assert "optimizer state" in line and "\n" not in line


@pytest.mark.parametrize("name", ["s2t_transformer", "wav2vec2"])
def test_of_any_architecture_it_is_what_the_parameters_need(name, data, caplog):
    """With experts of today, and with those of a growth."""
    words = "--optimizer", "adam", "--moe-expert-count"
    trainer = architectures.make_trainer(ROWS[name], data, *words, "4")
    needs = trainer.memory_of_step(), trainer.memory_of_step(8)
    with caplog.at_level("INFO", logger=LOGGER):
        trainer._memory_logged = False
        trainer.begin_epoch(2)
    assert "memory estimate without activations: a step needs " in caplog.text
    grown = architectures.make_trainer(ROWS[name], data, *words, "8")
    for each, need in zip((trainer, grown), needs, strict=True):
        number = sum(p.numel() for p in each.get_model().parameters())
        assert need.kinds["weights"] == need.kinds["gradients"] == 4 * number
        assert need.kinds["optimizer statistics"] == 8 * number
        assert "activations" not in need.kinds
