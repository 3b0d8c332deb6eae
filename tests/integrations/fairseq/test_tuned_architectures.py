"""``auto`` exchanges in ``NAME_moe``: one choice for a pass, on all ranks and in recomputations."""

import json
from pathlib import Path

import pytest
import torch
from helpers import architectures
from helpers.architectures import ROWS
from helpers.distributed import on_ranks
from helpers.training import named, save

from fairseq_tutel.distributed import gather_texts, process_world
from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.moe.recomputation import is_recomputing
from fairseq_tutel.tuning import exchange_tuner
from fairseq_tutel.tuning.timer import RegionTimer

TIMES = {1: 4000, 2: 3000, 4: 2000, 8: 5000}  # microseconds by overlap degree
AUTO = "--moe-overlap-degree auto --moe-tune-max-loss 1 --moe-tune-steps 3 --moe-freq 1"
UPDATES = 12


class _TableTimer(RegionTimer):
    """Real hooks, and times of a table."""

    exchange = None

    @property
    def microseconds(self):
        if super().microseconds is None or self.exchange is None:
            return None
        return TIMES[self.exchange.overlap_degree] + process_world()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    architectures.make_data(path)
    yield str(path)
    architectures.take_back()


def _watched(trainer):
    """What each call of a layer used: its number, overlap degree, and whether it came again."""
    calls = []

    def note(layer, args, kwargs):
        step = kwargs["step"]
        if layer.training:
            if step.timer is not None:
                step.timer.exchange = step.exchange
            calls.append((layer.layer_index, step.exchange.overlap_degree, is_recomputing()))

    for layer in moe_layers(trainer.model).values():
        layer.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def _train(trainer):
    for samples in architectures.batches(trainer, UPDATES, total=4):
        trainer.train_step(samples)
    return named(trainer)


@on_ranks(2)
def test_a_pass_has_one_choice_and_the_fastest_wins(folder, tmp_path):
    """Of an encoder and a decoder with other token counts, recomputed; weights as without."""
    exchange_tuner.RegionTimer = _TableTimer
    more = ["--checkpoint-activations"]

    def tuned():
        cfg = architectures.make_config(ROWS["bart"], folder, *AUTO.split(), *more)
        cfg.checkpoint.save_dir, cfg.checkpoint.no_save = str(tmp_path), False
        return architectures.trainer_of(cfg)

    trainer = tuned()
    calls, tuner, asked = _watched(trainer), trainer.get_model().exchange_tuner, []
    agree = tuner.agree
    tuner.agree = lambda *args: asked.append(args) or agree(*args)
    found = _train(trainer)
    passes = [calls[i : i + 8] for i in range(0, len(calls), 8)]  # 4 layers, each twice
    assert len(passes) == len(asked) == 2 * UPDATES
    for each in passes:
        assert [number for number, _, again in each if not again] == [0, 1, 2, 3]
        assert [again for _, _, again in each].count(True) == 4
        assert len({degree for _, degree, _ in each}) == 1
    assert {degree for _, degree, _ in calls} == set(TIMES)
    assert len(set(gather_texts(str(calls)))) == 1
    assert {degree for _, degree, _ in passes[-1]} == {4}
    torch.distributed.barrier()
    lines = [json.loads(line) for line in Path(tmp_path, "exchange.jsonl").read_text().splitlines()]
    (decision,) = [line for line in lines if line["what"] == "decision"]
    assert decision["choice"] == {"overlap_degree": 4} and decision["us"] == 2000

    # validation keeps the layers' own exchange; a resumed run knows the decision
    ((sample, *_),) = architectures.batches(trainer, 1, total=4)
    sample.pop("seed")
    with torch.no_grad():
        trainer.valid_step(sample)
    save(trainer, f"{tmp_path}/x.pt", UPDATES, moe_tuner=trainer.exchange_log.state())
    again = tuned()
    again.load_checkpoint(f"{tmp_path}/x.pt")
    calls = _watched(again)
    again.train_step(next(architectures.batches(again, 1, total=4)))
    assert {degree for _, degree, _ in calls} == {4}

    fixed = architectures.make_config(ROWS["bart"], folder, "--moe-freq", "1", *more)
    want = _train(architectures.trainer_of(fixed))
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_layer_drop_and_uneven_passes_stay_together(folder):
    """Calls that depend on layer drop and on three runs of a decoder."""
    for name, options in (
        ("roberta", "--encoder-layerdrop 0.5"),
        ("levenshtein_transformer", ""),
    ):
        cfg = architectures.make_config(ROWS[name], folder, *AUTO.split(), *options.split())
        trainer = architectures.trainer_of(cfg)
        calls = _watched(trainer)
        for samples in architectures.batches(trainer, 4, total=4):
            trainer.train_step(samples)
        assert calls and len(set(gather_texts(str(calls)))) == 1
        assert len({degree for _, degree, _ in calls}) > 1


def test_one_rank_has_nothing_to_choose(folder):
    trainer = architectures.make_trainer(ROWS["bart"], folder, *AUTO.split())
    assert trainer.model.exchange_tuner is None
    trainer.train_step(next(architectures.batches(trainer, 1)))


def test_layers_of_two_widths_are_refused_by_name(folder):
    wide = ["--decoder-embed-dim", "32", "--decoder-output-dim", "32"]
    with pytest.raises(ValueError, match="'auto' for overlap_degree: .* 16 and 32 wide"):
        architectures.make_trainer(ROWS["transformer_align"], folder, *AUTO.split(), *wide)
