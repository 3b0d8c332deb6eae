"""What ``--moe-grow-at`` refuses before the first update: placements, starts, memory."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.training import make_config, make_trainer

from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.integrations.fairseq.trainer import memory
from fairseq_tutel.integrations.fairseq.trainer.growth import RunGrowth

WORLD = {"world_size": 16, "ep_size": 2, "num_experts": 2, "placement": "sliced"}
STARTED = "needs fairseq-train, and ranks of python -m fairseq_tutel.launch or torchrun"


@pytest.mark.parametrize(
    "options, sizes, message, how",
    [
        ({}, {"num_experts": 16}, "must make more experts, but there are 16", "env://"),
        ({}, {"world_size": 3, "ep_size": 3}, "8 experts cannot be spread over 3", "env://"),
        ({"moe_expert_parallel_size": 3}, {"world_size": 6, "ep_size": 3},
         "must divide the number of ranks, 6, and that of experts, 8", "env://"),
        ({"moe_parallelism_r": "4"}, WORLD, "--moe-parallelism-r 4 does not fit 8 experts on 16 "
         "ranks: choose one of 0, 1, 2", "env://"),
        ({}, {"num_experts": 1, "world_size": 40, "placement": "sliced"}, "cannot be cut into 5",
         "env://"),
        ({"moe_tune_file": "x.json"}, {}, "sizes that --moe-tune-file is for", "env://"),
        ({}, {}, STARTED, "tcp://h:1"),
        ({}, {}, STARTED, "fairseq-hydra-train"),
    ],
)  # fmt: skip
def test_growth_that_cannot_be_is_refused_before_the_first_update(
    options, sizes, message, how, monkeypatch
):
    """Placements of more ranks than a test has: what is checked needs no others."""
    cfg = make_config("--moe-grow-at", "300:8", "--moe-expert-count", "4")
    cfg.checkpoint.no_save, distributed = False, cfg.distributed_training
    for name, value in options.items():
        cfg.model[name] = value
    layer = SimpleNamespace(experts=SimpleNamespace(hidden_dim=24))
    groups = ExpertParallelGroups(**{"num_experts": 4, **sizes})
    distributed.distributed_world_size = 2
    distributed.distributed_init_method = how
    if how == "fairseq-hydra-train":
        distributed.distributed_world_size, distributed.distributed_init_method = 1, None
        monkeypatch.setattr(sys, "argv", [how])
    with pytest.raises(ValueError, match=f"--moe-grow-at 300:8.*{message}"):
        RunGrowth(cfg, SimpleNamespace(moe_groups=groups, moe_layers={1: layer}))


def test_the_memory_of_the_model_to_come_is_checked_before_the_first_update(monkeypatch):
    eight = make_trainer(make_config("--moe-expert-count", "8")).memory_of_step()
    cfg = make_config("--moe-grow-at", "300:8", "--moe-expert-count", "4")
    cfg.checkpoint.no_save = False
    trainer = make_trainer(cfg)
    assert trainer.memory_of_step(8).kinds == eight.kinds != trainer.memory_of_step().kinds
    needed, mine = sum(eight.kinds.values()), 4 * sum(p.numel() for p in trainer.model.parameters())
    for free in (needed - mine, needed - mine - 1):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        fits = free == needed - mine
        with nullcontext() if fits else pytest.raises(ValueError, match="300:8.* does NOT fit"):
            make_trainer(cfg)
