"""Training on 2 and 4 ranks equals training on one, which accumulates the gradients of the same
micro-batches: losses (aux too), capacities, drops, gradients and weights of 10 updates."""

import functools

import pytest
from helpers.distributed import run_ranks
from helpers.equivalence import assert_trained_like_one
from helpers.training import (
    gradients,
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
)

from fairseq_tutel.distributed import process_world

UPDATES = 10
PYTORCH = "--ddp-backend pytorch_ddp"
DROPLESS = "--moe-capacity-factor 0"
# options; 4 micro-batches per update, 8 with update-freq 2 (on 4 ranks 1 and 2 of each)
CASES = {
    **{
        f"E={e} K={k} {'dropless' if options else 'drops'}": f"--moe-top-k {k} {options}"
        for e in (1, 2, 4, 8)
        for k in (1, 2, 4)
        for options in ("", DROPLESS)
        if k <= e
    },
    **{
        f"E={e} K=2 update-freq 2 {options}": f"--moe-top-k 2 {options}"
        for e in (2, 4, 8)
        for options in ("", PYTORCH)
    },
    "E=2 K=2 checkpoint-activations pytorch_ddp": f"--checkpoint-activations {PYTORCH}",
    "E=4 K=2 checkpoint-activations dropless": f"--checkpoint-activations {DROPLESS}",
    "E=8 K=2 checkpoint-activations pytorch_ddp": f"--checkpoint-activations {PYTORCH}",
    "E=4 top1-expert, z-loss, average": "--moe-top1-expert --moe-z-loss-wt 0.01 "
    "--moe-gate-loss-combine-method average",
    "E=4 prioritised, normalised before, dynamic": "--moe-batch-prioritized-routing "
    "--moe-normalize-gate-prob-before-dropping --moe-capacity-factor -0.75",
    "E=4 K=2 re-routed, by probability, sigmoid": "--moe-overflow-rerouting 1 --moe-drop-policy "
    "probability --moe-score-function sigmoid --moe-capacity-factor 0.6 "
    "--moe-gate-loss-choices all --moe-gate-loss-scope sequence",
    "E=8 K=2 in groups": "--moe-null-experts 4",
    "E=6 K=2 in groups dropless update-freq 2": f"{DROPLESS} {PYTORCH} --checkpoint-activations "
    "--moe-shared-expert-ffn-dim 12 --moe-null-experts 2 --lr 0.007",
    # r as many as ranks hold an expert, or the weights travel
    "E=2 K=2 in slices": "--moe-overlap-degree 2",
    "E=1 K=1 in slices dropless update-freq 2": f"{DROPLESS} {PYTORCH} --checkpoint-activations "
    "--clip-norm 0.25",
    "E=2 K=2 in slices r=0": "--moe-expert-placement sliced --moe-parallelism-r 0",
    "E=4 cosine, every layer sparse, untied": "--moe-router cosine --moe-freq 1 "
    "--moe-expert-ffn-dim 12",
}


@functools.cache
def configs():
    return {
        name: make_config("--clip-norm", "0.3", "--moe-expert-count", name[2], *options.split())
        for name, options in CASES.items()
    }


def _train(cases):
    """Per case: every update's record, gradients of the first and the last, weights at the end."""
    rank, _ = process_world()
    found = {}
    for name, cfg in cases.items():
        batches = 8 if "update-freq 2" in name else 4
        if "in groups" in name:  # half of the ranks hold all experts
            cfg.model.moe_expert_parallel_size = max(1, process_world()[1] // 2)
        if "in slices" in name and "r=0" not in name:
            cfg.model.moe_expert_placement = "sliced"
            cfg.model.moe_parallelism_r = max(1, process_world()[1] // cfg.model.moe_expert_count)
        trainer = make_trainer(cfg)
        updates = record_updates(trainer)
        grads = []
        for update in range(UPDATES):
            trainer.train_step(own_batches(update, batches))
            if update in (0, UPDATES - 1):
                grads.append(gradients(trainer))
        assert trainer.get_num_updates() == len(updates) == UPDATES
        found[name] = (updates, grads, named(trainer))
    return found


@functools.cache
def trained(world_size):
    return run_ranks(_train, world_size, configs(), timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_like_one(name, world_size):
    ((one,), ranks) = ([found[name] for found in trained(size)] for size in (1, world_size))
    sliced = configs()[name].model.moe_expert_count if "in slices" in name else 0
    assert_trained_like_one(one, ranks, sliced)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cases_train_and_drop_as_they_say(name):
    """Or the comparison would be of nothing."""
    ((updates, _, weights),) = (found[name] for found in trained(1))
    losses = [u.sums["loss"] / u.sample_size for u in updates]
    assert losses[-1] < 0.95 * losses[0]
    limit = configs()[name].optimization.clip_norm
    assert all(u.grad_norm > limit for u in updates)  # it was clipped
    if "dropless" in name:
        assert all(u.sums["overflow_expert1"] == 0 for u in updates)
    elif "K=2" in name and "E=2" not in name:
        assert all(u.sums["overflow_expert2"] > 0 for u in updates)
