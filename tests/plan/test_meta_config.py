"""configs/meta_1.1t.yaml: what it says, and that stock fairseq-hydra-train runs it, made small."""

import json
from pathlib import Path

from omegaconf import OmegaConf
from plan_helpers import CONFIGS

ROOT = Path(__file__).parents[2]
TINY = [
    "common.cpu=true", "common.log_interval=5", "distributed_training.distributed_world_size=1",
    "model.moe_expert_count=4", "model.decoder_layers=2", "model.decoder_embed_dim=32",
    "model.decoder_ffn_embed_dim=64", "model.decoder_attention_heads=2", "task.dict_size=156",
    "task.tokens_per_sample=32", "task.dataset_size=40", "dataset.batch_size=4",
    "optimization.max_update=20", "optimization.lr=[0.01]", "lr_scheduler.warmup_updates=0",
]  # fmt: skip


def test_values_of_the_announcement():
    config = OmegaConf.load(CONFIGS / "meta_1.1t.yaml")
    announced = {
        "model.decoder_layers": 32, "model.decoder_attention_heads": 32,
        "model.decoder_embed_dim": 4096, "model.decoder_ffn_embed_dim": 16384,
        "model.moe_freq": 2, "model.moe_expert_count": 512, "model.moe_gating_use_fp32": True,
        "task.tokens_per_sample": 1024, "dataset.batch_size": 24, "optimizer._name": "adam",
        "optimizer.fp16_adam_stats": True, "criterion._name": "moe_cross_entropy",
        "common.memory_efficient_fp16": True, "common.fp16": True,
    }  # fmt: skip
    for key, value in announced.items():
        assert OmegaConf.select(config, key) == value, key
    # 4 special symbols, and fairseq pads to a multiple of 8
    assert (config.task.dict_size + 4 + 7) // 8 * 8 == 51200
    # a benchmark run on 512 GPUs is one epoch of full batches
    needed = 512 * config.dataset.batch_size * config.optimization.max_update
    assert config.task.dataset_size >= needed


def test_hydra_train_runs_it_small(programs, tmp_path):
    done = programs.run(
        ["fairseq-hydra-train", "--config-dir", str(CONFIGS), "--config-name", "meta_1.1t",
         *TINY, f"hydra.run.dir={tmp_path}"],
        cwd=tmp_path, timeout=200,
    )  # fmt: skip
    log = done.text
    assert done.status == 0, log[-3000:]
    assert "Adam with fp16 statistics" in log
    updates = [json.loads(line.split(" - ", 1)[1]) for line in log.splitlines()
               if "[train_inner]" in line]  # fmt: skip
    losses = [float(update["loss"]) for update in updates]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0], losses
    assert log.count("Saved checkpoint") == 1  # not at the end of each of its two epochs
    assert list(tmp_path.glob("checkpoints/meta_1.1t/checkpoint_last.pt"))
