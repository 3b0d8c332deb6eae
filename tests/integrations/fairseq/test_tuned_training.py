"""Training with ``--moe-overlap-degree auto``: what is written, resumed and pinned."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from helpers.distributed import run_ranks
from helpers.training import make_config, make_trainer, named, own_batches, save

from fairseq_tutel.distributed import build_groups, gather_texts, process_world
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoEConfig
from fairseq_tutel.integrations.fairseq.models.moe_stack import make_tuner
from fairseq_tutel.integrations.fairseq.options.options import run_options
from fairseq_tutel.integrations.fairseq.trainer.run_logs import ExchangeLog
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.tuning import ExchangeTuner, exchange_tuner
from fairseq_tutel.tuning.timer import RegionTimer

# microseconds by degree and algorithm: the other algorithm is better from the second degree on
TIMES = {1: (4000, 4100), 2: (3000, 2000), 4: (3500, 2500), 8: (5000, 4900)}
WORDS = """
    --moe-expert-count 4 --moe-overlap-degree auto --moe-exchange auto --moe-ranks-per-node 2
    --moe-tune-max-loss 1 --moe-tune-steps 3 --moe-capacity-factor 2 --max-update 60
"""
SAVED_AT, END = 8, 30


class _TableTimer(RegionTimer):
    exchange = None

    @property
    def microseconds(self):
        rank, _ = process_world()
        numbers = TIMES[self.exchange.overlap_degree]
        return numbers[self.exchange.algorithm == "2dh"] + rank


def _watched(trainer, used):
    """Each step's timer knows its exchange."""
    tuner = trainer.get_model().exchange_tuner
    agree = tuner.agree_stacks

    def noted(*args, **kwargs):
        (step,) = agree(*args, **kwargs)  # a language model has one stack
        used.append(step.exchange)
        if step.timer is not None:
            step.timer.exchange = step.exchange
        return [step]

    tuner.agree_stacks = noted
    return trainer


def _train(trainer, first, last):
    for update in range(first, last):
        with metrics.aggregate("train_inner"):
            trainer.train_step(own_batches(update, 4))
        found = metrics.get_smoothed_values("train_inner")
    return found


def _tune(cfg, folder):
    exchange_tuner.RegionTimer = _TableTimer
    cfg.checkpoint.save_dir, cfg.checkpoint.no_save = folder, False
    used, again, path = [], [], f"{folder}/checkpoint_last.pt"
    trainer = _watched(make_trainer(cfg), used)
    _train(trainer, 0, SAVED_AT)
    state = trainer.exchange_log.state()
    save(trainer, path, SAVED_AT, moe_tuner=state)
    torch.distributed.barrier()
    assert json.loads(Path(folder, "exchange.json").read_text())["open"]  # in mid-search
    values = _train(trainer, SAVED_AT, END)
    torch.distributed.barrier()
    lines = _lines(folder)
    torch.distributed.barrier()

    # what was killed after the save goes on where it was, and makes the same lines again
    resumed = _watched(make_trainer(cfg), again)
    resumed.load_checkpoint(path)
    _train(resumed, SAVED_AT, END)
    begin = len(used) - len(again)
    # the first step of a process is not measured, so that its trial is a step longer
    assert _trials(used) == _trials([*used[:begin], *again])
    torch.distributed.barrier()
    assert _lines(folder) == lines
    save(resumed, path, SAVED_AT, moe_tuner=state)
    torch.distributed.barrier()
    pinned = _pinned(cfg, folder, used[-1])
    _unlike_groups()
    return values, pinned


def _unlike_groups():
    """Two groups of two ranks that exchange tokens, of other numbers: one choice for all."""
    rank, _ = process_world()
    layer = MoELayer(8, 2, 8, groups=build_groups(2), seed=3)
    tuner = ExchangeTuner([layer], max_loss=1.0)
    for number in range(12):
        step = tuner.agree(3000 if rank > 1 else 8, torch.float32)
        assert step.num_tokens == (3000 if rank > 1 else 8)  # capacities are those of a group
        if step.timer is not None:
            step.timer.exchange = step.exchange
        texts = gather_texts(str(step.exchange))
        assert len(set(texts)) == 1, number
    assert len(tuner.take_events()) >= 2
    (key,) = tuner._tuner.searches
    assert key.bucket == 3000 // 128


def _trials(exchanges):
    return [e for e, before in zip(exchanges, [None, *exchanges], strict=False) if e != before]


def _lines(folder):
    """What the tuner did, without when."""
    lines = Path(folder, "exchange.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "update"} for line in lines]


def _pinned(cfg, folder, chosen):
    """The same weights twice with the choices of a file, which nothing is measured for."""
    cfg.model.moe_tune_file = f"{folder}/exchange.json"
    weights, used = [], []
    for _ in range(2):
        trainer = _watched(make_trainer(cfg), used)
        _train(trainer, 0, 4)
        weights.append(named(trainer))
        assert not trainer.get_model().exchange_tuner.take_events()
    assert set(used) == {chosen}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return chosen


def test_a_tuned_run_writes_resumes_and_is_pinned(tmp_path):
    cfg = make_config(*WORDS.split())
    folder = str(tmp_path / "run")
    os.makedirs(folder)
    results = run_ranks(_tune, 4, cfg, folder, timeout=200)
    for values, chosen in results:
        assert (chosen.algorithm, chosen.overlap_degree) == ("2dh", 2)
        assert 2 <= values["moe_exchange_ms"] <= 5  # a mean over updates
    file = json.loads((tmp_path / "run" / "exchange.json").read_text())
    (found,) = file["keys"].values()
    assert found["closed"] and found["us"] == 2000 and found["choice"]["algorithm"] == "2dh"
    lines = [json.loads(line) for line in (tmp_path / "run" / "exchange.jsonl").open()]
    assert [line["what"] for line in lines].count("decision") == 1
    assert all(set(line) >= {"update", "what", "key", "choice"} for line in lines)
    assert all(line["about"].startswith("float32, model dim ") for line in lines)


def test_a_bad_file_is_refused_on_one_rank_too(tmp_path):
    model = make_config(*WORDS.split()).model
    layers = [MoELayer(8, 4, 8)]
    assert make_tuner(run_options(model, TransformerLMGPTMoEConfig), layers) is None
    model.moe_tune_file = path = str(tmp_path / "x.json")
    for text, said in ((None, "No such"), ("{", "not a file of exch"), ("", "not a file of exch")):
        if text is not None:
            Path(path).write_text(text)
        with pytest.raises(ValueError, match=f"--moe-tune-file '{re.escape(path)}': .*{said}"):
            make_tuner(run_options(model, TransformerLMGPTMoEConfig), layers)


def test_two_runs_with_one_folder_do_not_take_each_others_file_away(tmp_path, monkeypatch):
    """The second run writes and renames its file between the first one's two steps."""
    tuners = [SimpleNamespace(is_pinned=False, file=lambda t=t: t) for t in ("one", "two")]
    one, two = (ExchangeLog(tuner, str(tmp_path), writes=True) for tuner in tuners)
    replace = os.replace

    def after_the_other(*paths):
        monkeypatch.setattr(os, "replace", replace)
        two.save()
        replace(*paths)

    monkeypatch.setattr(os, "replace", after_the_other)
    one.save()
    assert (tmp_path / "exchange.json").read_text() == "one\n"
    assert os.listdir(tmp_path) == ["exchange.json"]
