"""What the trainer refuses or records, and that models without experts are left alone."""

import json

import pytest
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from helpers.distributed import run_ranks
from helpers.training import make_batch, make_config, make_trainer, own_batches, save
from omegaconf import OmegaConf

from fairseq_tutel.integrations.fairseq.trainer.trainer import MoETrainer


@pytest.mark.parametrize("words, fields, message", [
    ("", "common.amp=true", "--amp is not supported"),
    ("", "common.tpu=true", "--tpu is not supported"),
    ("", "optimization.use_bmuf=true", "--use-bmuf is not supported"),
    ("", "ema.store_ema=true", "--store-ema is not supported"),
    ("", "distributed_training.ddp_backend=fully_sharded",
     "fully_sharded .* use legacy_ddp or"),
    ("", "distributed_training.ddp_backend=slowmo", "slowmo .* use legacy_ddp or pytorch_ddp"),
    ("--moe-expert-count 4 --moe-load-bias quantile", "",
     "--moe-load-bias quantile needs --criterion moe_cross"),
    ("--zero-sharding os --optimizer adafactor", "", "adam, nag or sgd, not adafactor"),
    ("--moe-expert-dtype int8", "", "--moe-expert-dtype int8 is for evaluation: train without it"),
    ("--moe-map-experts", "", "--moe-map-experts is for evaluation: train without it"),
    ("--moe-lora-rank 2 --moe-grow-at 5:8", "", "give one of them"),
    ("--moe-lora-rank 2 --moe-map-experts", "", "merge it first"),
])  # fmt: skip
def test_what_cannot_train_experts_is_refused(words, fields, message):
    with pytest.raises((ValueError, SystemExit), match=message):
        cfg = make_config("--moe-expert-count", "2", *words.split())
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(fields.split()))
        if "needs --criterion" in message:
            cfg.criterion = {"_name": "cross_entropy", "sentence_avg": False}
        make_trainer(cfg).optimizer  # noqa: B018 (builds it)


@pytest.mark.parametrize(
    "criterion, experts, warning",
    [
        ("moe_cross_entropy", "2", None),
        ("cross_entropy", "2", "leaves out the gate loss"),
        ("moe_cross_entropy", "0", "1 expert per MoE layer"),
    ],
)
def test_what_is_seldom_meant_is_warned_of(criterion, experts, warning, caplog):
    caplog.set_level("WARNING", logger="fairseq_tutel.integrations.fairseq")
    cfg = make_config("--moe-top-k", "1", "--moe-expert-count", experts)
    if criterion == "cross_entropy":
        cfg.criterion = {"_name": criterion, "sentence_avg": False}
    make_trainer(cfg)
    assert warning in caplog.text if warning else not caplog.messages


def test_the_config_says_what_was_decided():
    """In a checkpoint too: the number of experts that the number of ranks gave, flat gradients."""
    trainer = make_trainer(make_config("--moe-top-k", "1", "--fp16"))
    assert trainer.cfg.model.moe_expert_count == 1
    assert trainer.cfg.common.fp16_no_flatten_grads
    assert len(trainer.optimizer.fp32_params) == len(list(trainer.get_model().parameters()))


def test_models_without_experts_get_the_stock_trainer():
    for cfg in (make_config(moe=False), make_config("--moe-freq", "0")):
        assert type(make_trainer(cfg)) is Trainer
    assert type(make_trainer(make_config("--moe-expert-count", "2"))) is MoETrainer


@pytest.mark.parametrize("steps", [0, 3])
def test_meters_go_on_within_an_epoch_and_begin_anew_with_the_next(steps, tmp_path):
    cfg = make_config("--moe-expert-count", "2")
    metrics.reset()
    trainer = make_trainer(cfg)
    trainer.train_step([make_batch(0)])
    save(trainer, tmp_path / "last.pt", steps)
    metrics.reset()
    make_trainer(cfg).load_checkpoint(str(tmp_path / "last.pt"))
    assert ("loss" in metrics.get_smoothed_values("default")) == (steps > 0)


def _loads(cfg, folder):
    cfg.checkpoint.save_dir = folder
    trainer = make_trainer(cfg)
    for update in range(5):
        trainer.train_step(own_batches(update, 4))
        trainer.valid_step(make_batch(50 + update))  # does not count


@pytest.mark.parametrize("world_size", [1, 2])
def test_expert_loads_are_written_every_few_updates(world_size, tmp_path):
    words = "--moe-expert-count 4 --moe-load-log-interval 2 --moe-freq 1 --decoder-layers 3"
    run_ranks(_loads, world_size, make_config(*words.split()), str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "expert_load.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [2, 4]
    for row in rows:
        assert list(row["layers"]) == ["0", "1", "2"]
        for load in row["layers"].values():
            # 2 updates of 4 batches of 4 sentences of 8 tokens, 2 experts each
            assert len(load) == 4 and sum(load) == 2 * 4 * 4 * 8 * 2
        for name, used in row["utilisation"].items():
            load, received = row["layers"][name], row["ranks"][name]
            assert len(received) == world_size
            assert used["load"] == pytest.approx(100 * sum(load) / 4 / max(load), abs=0.01)
            assert used["drop"] == pytest.approx(100 * (1 - sum(received) / sum(load)), abs=0.01)
            assert used["slot"] <= 100 and used["dead"] == load.count(0)


def test_workers_for_validation_data_are_their_own_option():
    cfg = make_config("--moe-expert-count", "2", "--num-workers", "5", "--num-workers-valid", "3")
    trainer = make_trainer(cfg)
    seen = []

    def get_batch_iterator(num_workers, **kwargs):
        seen.append(num_workers)
        raise StopIteration

    trainer.task.load_dataset("valid")
    trainer.task.get_batch_iterator = get_batch_iterator
    with pytest.raises(StopIteration):
        trainer.get_valid_iterator("valid")
    trainer.task.load_dataset("train")
    with pytest.raises(StopIteration):
        trainer.get_train_iterator(1, load_dataset=False)
    assert seen == [3, 5]
