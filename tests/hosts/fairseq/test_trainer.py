"""What the trainer refuses or records, and that models without experts are left alone."""

import json

import pytest
from fairseq import tasks
from fairseq.trainer import Trainer
from helpers.commands import ROOT, logged
from helpers.distributed import run_ranks
from helpers.training import (
    gradients,
    make_batch,
    make_config,
    make_trainer,
    own_batches,
    record_updates,
)

from fairseq_tutel.hosts.fairseq.trainer import MoETrainer

GOLDEN = ROOT / "tests" / "golden"


@pytest.mark.parametrize(
    "group, name, value, message",
    [
        ("common", "amp", True, "--amp is not supported"),
        ("common", "tpu", True, "--tpu is not supported"),
        ("optimization", "use_bmuf", True, "--use-bmuf is not supported"),
        ("ema", "store_ema", True, "--store-ema is not supported"),
        ("distributed_training", "zero_sharding", "os", "--zero-sharding os is not supported"),
        (
            "distributed_training",
            "ddp_backend",
            "fully_sharded",
            "fully_sharded cannot train.*legacy_ddp or pytorch_ddp",
        ),
        ("distributed_training", "ddp_backend", "slowmo", "slowmo: use legacy_ddp or pytorch_ddp"),
    ],
)
def test_what_cannot_train_experts_is_refused(group, name, value, message):
    cfg = make_config("--moe-expert-count", "2")
    cfg[group][name] = value
    with pytest.raises(ValueError, match=message):
        make_trainer(cfg)


@pytest.mark.parametrize("warns", [True, False])
def test_a_criterion_without_the_gate_loss_is_warned_of(warns, caplog):
    cfg = make_config("--moe-expert-count", "2")
    if warns:
        cfg.criterion = {"_name": "cross_entropy", "sentence_avg": False}
    caplog.set_level("WARNING", logger="fairseq_tutel.hosts.fairseq.trainer")
    make_trainer(cfg)
    assert ("leaves out the gate loss" in caplog.text) == warns


@pytest.mark.parametrize(
    "words, warns",
    [
        ("--fp16-adam-stats", True),
        ("--fp16-adam-stats --memory-efficient-fp16", False),
        ("--fp16-adam-stats --bf16", False),
        ("--memory-efficient-fp16", False),
        ("", False),
    ],
)
def test_fp16_statistics_of_fp32_training_are_warned_of(words, warns, caplog):
    cfg = make_config("--moe-expert-count", "2", *words.split())
    caplog.set_level("WARNING", logger="fairseq_tutel.hosts.fairseq.trainer")
    make_trainer(cfg)
    assert ("--fp16-adam-stats in fp32 training" in caplog.text) == warns


@pytest.mark.parametrize("words, warns", [((), True), (("--moe-expert-count", "1"), False)])
def test_one_expert_by_default_is_warned_of(words, warns, caplog):
    caplog.set_level("WARNING", logger="fairseq_tutel.models.transformer_lm_gpt_moe")
    make_trainer(make_config("--moe-top-k", "1", *words))
    assert ("1 expert per MoE layer" in caplog.text) == warns


def test_world_size_must_be_that_of_the_connected_processes():
    cfg = make_config("--moe-expert-count", "2")
    task = tasks.setup_task(cfg.task)
    cfg.distributed_training.distributed_world_size = 4
    with pytest.raises(ValueError, match="--distributed-world-size 4, but 1 processes"):
        Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def test_fp16_gradients_are_not_flattened():
    trainer = make_trainer(make_config("--moe-expert-count", "2", "--fp16"))
    assert trainer.cfg.common.fp16_no_flatten_grads
    assert len(trainer.optimizer.fp32_params) == len(list(trainer.get_model().parameters()))


def test_the_config_has_the_number_of_experts():
    """In a checkpoint too, where the number of ranks decided."""
    trainer = make_trainer(make_config("--moe-top-k", "1"))
    assert trainer.cfg.model.moe_expert_count == 1


def test_models_without_experts_get_the_stock_trainer():
    for cfg in (make_config(moe=False), make_config("--moe-freq", "0")):
        assert type(make_trainer(cfg)) is Trainer
    assert type(make_trainer(make_config("--moe-expert-count", "2"))) is MoETrainer


@pytest.mark.slow
def test_dense_training_is_the_same_with_the_plugin(tmp_path, programs):
    """fairseq's own model with fairseq-train: every logged value, with and without --user-dir."""
    logs = []
    for name, extra in (("without", ()), ("with", ("--user-dir", str(ROOT / "fairseq_tutel")))):
        folder = tmp_path / name
        words = f"""
            {GOLDEN / "data_world1"} --task language_modeling --tokens-per-sample 128
            --sample-break-mode none --arch transformer_lm_gpt --decoder-layers 2
            --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4
            --optimizer adam --lr 0.002 --clip-norm 1.0 --seed 7 --batch-size 1 --cpu
            --required-batch-size-multiple 1 --max-update 5 --log-format json
            --save-dir {folder} --no-epoch-checkpoints
        """
        done = programs.run(["fairseq-train", *words.split(), *extra], timeout=150)
        assert done.status == 0, done.text[-3000:]
        assert (folder / "checkpoint_last.pt").exists()  # one file, as always
        rows = logged(done.text, "train") + logged(done.text, "valid")
        assert len(rows) == 10
        timings = ("wps", "ups", "wall", "train_wall")
        logs.append([{k: v for k, v in row.items() if k not in timings} for row in rows])
    assert logs[0] == logs[1]


def _loads(cfg, folder):
    """The same totals, from the updates themselves."""
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


def _dense_on_ranks(cfg):
    """A model without experts under the stock trainer still trains on several ranks."""
    trainer = make_trainer(cfg)
    assert type(trainer) is Trainer
    updates = record_updates(trainer)
    trainer.train_step(own_batches(0, 2))
    grad = gradients(trainer)["decoder.layers.0.fc1.bias"]
    return updates[0].sums["loss"], updates[0].grad_norm, grad


def test_dense_models_of_the_arch_train_on_two_ranks():
    cfg = make_config("--moe-freq", "0")
    (one,) = run_ranks(_dense_on_ranks, 1, cfg)
    for loss, norm, grad in run_ranks(_dense_on_ranks, 2, cfg):
        assert loss == pytest.approx(one[0]) and norm == pytest.approx(one[1], rel=1e-4)
        assert (grad - one[2]).norm() < 1e-5 * one[2].norm()


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


def _log_many_loads(folder):
    """The loads of 512 experts in 12 layers, summed over two ranks and written by the first."""
    cfg = make_config(
        "--moe-expert-count", "512", "--decoder-layers", "12", "--moe-freq", "1",
        "--moe-load-log-interval", "1", "--save-dir", folder,
    )  # fmt: skip
    trainer = make_trainer(cfg)
    trainer.train_step(own_batches(0, 2))


def test_the_loads_of_many_experts_travel_between_ranks(tmp_path):
    """More than the 16 KiB of the pickled messages by which fairseq gathers other statistics."""
    run_ranks(_log_many_loads, 2, str(tmp_path))
    (line,) = (tmp_path / "expert_load.jsonl").read_text().splitlines()
    layers = json.loads(line)["layers"]
    assert len(layers) == 12
    pairs = 2 * sum(batch["ntokens"] for batch in (make_batch(0), make_batch(1)))
    assert all(len(load) == 512 and sum(load) == pairs for load in layers.values())
