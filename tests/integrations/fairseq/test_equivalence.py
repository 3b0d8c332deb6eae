"""Training on 2 and 4 ranks equals training on one, which accumulates the gradients of the same
micro-batches: losses (aux too), capacities, drops, gradients and weights of all updates.

Sources and targets of a translation have different lengths, so that both are padded.
"""

import functools
import re

import pytest
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.training import (
    gradients,
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
)
from helpers.translation import make_pairs, own_pairs, pair_config

from fairseq_tutel.distributed import process_world, take_slice

UPDATES = 3
PYTORCH = "--ddp-backend pytorch_ddp"
DROPLESS = "--moe-capacity-factor 0"
HELPED = f"{DROPLESS} --moe-balance-ranks --moe-balance-min-rows 1 --moe-balance-tolerance 1"
# options; 4 micro-batches per update, 8 with update-freq 2 (on 4 ranks 1 and 2 of each)
LANGUAGE_MODELS = {
    "E=1 K=1 drops": "--moe-top-k 1",
    "E=2 K=1 drops": "--moe-top-k 1",
    "E=4 K=1 dropless": f"--moe-top-k 1 {DROPLESS}",
    "E=4 K=4 drops": "--moe-top-k 4",
    "E=8 K=4 dropless helped": f"--moe-top-k 4 {HELPED}",
    "E=2 K=2 update-freq 2 pytorch_ddp": PYTORCH,
    "E=4 K=2 update-freq 2": "",
    "E=4 K=2 checkpoint-activations dropless helped": f"--checkpoint-activations {HELPED}",
    "E=8 K=2 checkpoint-activations pytorch_ddp": f"--checkpoint-activations {PYTORCH}",
    # recomputed layers exchange again, in the same order
    "E=8 K=2 checkpoint-activations 2dh": "--checkpoint-activations --moe-exchange 2dh "
    "--moe-overlap-degree 4",
    "E=4 top1-expert, z-loss, average": "--moe-top1-expert --moe-z-loss-wt 0.01 "
    "--moe-gate-loss-combine-method average --moe-load-bias quantile",
    "E=4 prioritised, normalised before, dynamic": "--moe-batch-prioritized-routing "
    "--moe-normalize-gate-prob-before-dropping --moe-capacity-factor -0.75",
    "E=4 K=2 re-routed, by probability, sigmoid": "--moe-overflow-rerouting 1 --moe-drop-policy "
    "probability --moe-score-function sigmoid --moe-capacity-factor 0.6 "
    "--moe-gate-loss-choices all --moe-gate-loss-scope sequence",
    "E=8 K=2 in groups": "--moe-null-experts 4",
    "E=6 K=2 in groups dropless helped update-freq 2": f"{HELPED} {PYTORCH} "
    "--checkpoint-activations --moe-shared-expert-ffn-dim 12 --moe-null-experts 2 --lr 0.007",
    # r as many as ranks hold an expert, or the weights travel
    "E=2 K=2 in slices": "--moe-overlap-degree 2",
    "E=1 K=1 in slices dropless update-freq 2": f"{DROPLESS} {PYTORCH} --checkpoint-activations "
    "--clip-norm 0.25",
    "E=2 K=2 in slices r=0": "--moe-expert-placement sliced --moe-parallelism-r 0",
    "E=4 cosine, every layer sparse, untied": "--moe-router cosine --moe-freq 1 "
    "--moe-expert-ffn-dim 12",
}


TRANSLATIONS = {
    "E=4 K=2 drops, masked": "--use-moe-pad-mask --moe-freq 1",
    "E=4 dropless helped update-freq 2": f"{HELPED} --checkpoint-activations {PYTORCH} "
    "--moe-cmr --cmr-gate-loss-wt 0.1 --cmr-gate-loss-p 0.8",
    "E=4 K=2 in groups": "--moe-overflow-rerouting 1 --moe-capacity-factor 0.6 --moe-wire-compact",
    "E=2 dropless in slices": f"{DROPLESS} --encoder-moe-freq 1",
    "E=8 K=2 2dh, overlap": "--moe-exchange 2dh --moe-overlap-degree 2 "
    "--moe-gate-loss-scope sequence --moe-gate-loss-over unpadded --use-moe-pad-mask",
    "E=4 dropless wire": f"{DROPLESS} --moe-wire fp16",
    "E=4 load bias, top-1": "--moe-top1-expert --moe-load-bias sign --decoder-moe-freq 1",
}
CASES = {**LANGUAGE_MODELS, **{f"translation {name}": o for name, o in TRANSLATIONS.items()}}


@functools.cache
def configs():
    def config(make, clip, name, options):
        return make("--clip-norm", clip, "--moe-expert-count", name[2], *options.split())

    found = {n: config(make_config, "0.3", n, o) for n, o in LANGUAGE_MODELS.items()}
    for name, options in TRANSLATIONS.items():
        found[f"translation {name}"] = config(pair_config, "0.5", name, options)
    return found


def _fit(name, model, world_size):
    """Place the experts as the name says, on so many ranks."""
    if "in groups" in name:  # half of the ranks hold all experts
        model.moe_expert_parallel_size = max(1, world_size // 2)
    if "in slices" in name and "r=0" not in name:
        model.moe_expert_placement = "sliced"
        if not name.startswith("translation"):
            model.moe_parallelism_r = max(1, world_size // model.moe_expert_count)
    if "2dh" in name and world_size == 4:
        model.moe_ranks_per_node = 2


def _sizes(name):
    """Numbers of ranks: one for each run, and the other one too with --long.

    Four where two would be none of it: groups, slices, nodes, more ranks than experts.
    """
    four = re.search("in groups|in slices|2dh|E=[12] K=1 drops|K=4 dropless", name)
    return (4, 2) if four else (2, 4)


def _train(cases):
    """Per case: every update's record, gradients of the first and the last, weights at the end."""
    found = {}
    for name, cfg in cases.items():
        translates = name.startswith("translation")
        own = own_pairs if translates else own_batches
        _fit(name, cfg.model, process_world()[1])
        trainer = make_trainer(cfg, make_pairs(0) if translates else None)
        updates = record_updates(trainer)
        grads = []
        for update in range(UPDATES):
            trainer.train_step(own(update, 8 if "update-freq 2" in name else 4))
            if update in (0, UPDATES - 1):
                grads.append(gradients(trainer))
        assert trainer.get_num_updates() == len(updates) == UPDATES
        found[name] = (updates, grads, named(trainer))
    return found


@functools.cache
def trained(world_size, usual=True):
    """What :func:`_train` found on each rank; of several, for the runs of their usual number."""
    cases = {
        name: cfg
        for name, cfg in configs().items()
        if world_size == 1 or (_sizes(name)[0] == world_size) == usual
    }
    return run_ranks(_train, world_size, cases, timeout=280)


def assert_equal_tensors(what, got, want, slices):
    """Compare tensors by name; of an expert ``got`` has one of ``slices`` (number, how many)."""
    assert got, what
    for name, value in got.items():
        expected = want[name]
        if ".experts." in name:
            kind = name.rsplit(".", 1)[1].split("[")[0].replace("_", ".")
            expected = take_slice(expected, kind, *slices)
        # rounding is all there is in its gradient, and Adam amplifies that
        if not name.endswith("k_proj.bias"):
            assert value.shape == expected.shape, name
            # a score at the edge of a bin of the quantile rule's histogram may fall on either side
            limit = 0.01 if name.endswith("load_bias") else 1e-4
            assert rms_ratio(value, expected) < limit, f"{what} of {name}"


def assert_trained_like_one(one, ranks, sliced_experts):
    """Compare what :func:`_train` found on one rank with that of each of several.

    ``sliced_experts``: their number, where each is spread over as many ranks as there are for it.
    """
    updates, grads, weights = one
    seen = set()
    for rank, (got_updates, got_grads, got_weights) in enumerate(ranks):
        slices = (0, 1)
        if 0 < sliced_experts < len(ranks):
            slices = (rank // sliced_experts, len(ranks) // sliced_experts)
        for got, want in zip(got_updates, updates, strict=True):
            assert got.sample_size == want.sample_size
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
            for key, value in want.sums.items():
                assert got.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
        for got, want in zip(got_grads, grads, strict=True):
            assert_equal_tensors("gradient", got, want, slices)
        assert_equal_tensors("weight", got_weights, weights, slices)
        seen |= set(got_weights)
    assert seen == set(weights)  # every expert is somewhere


@pytest.mark.slow
@pytest.mark.parametrize("usual", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_like_one(name, usual):
    (one,) = (found[name] for found in trained(1))
    ranks = [found[name] for found in trained(_sizes(name)[not usual], usual)]
    if "wire" in name:  # rows are rounded on their way
        for updates, *_ in ranks:
            for got, want in zip(updates, one[0], strict=True):
                assert got.sums["loss"] == pytest.approx(want.sums["loss"], rel=2e-3)
                error, layers = (got.sums[f"moe_wire_{n}_dispatch"] for n in ("error", "layers"))
                assert 0 < error < 1e-3 * layers
        return
    if "helped" in name and "groups" not in name:
        moved = sum(u.sums["moe_rows_helped"] for updates, *_ in ranks for u in updates)
        assert moved > 0
    sliced = configs()[name].model.moe_expert_count if "in slices" in name else 0
    assert_trained_like_one(one, ranks, sliced)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cases_train_and_drop_as_they_say(name):
    """Or the comparison would be of nothing."""
    ((updates, _, weights),) = (found[name] for found in trained(1))
    losses = [u.sums["loss"] / u.sample_size for u in updates]
    assert losses[-1] < 0.97 * losses[0]
    limit = configs()[name].optimization.clip_norm
    assert all(u.grad_norm > limit for u in updates)  # it was clipped
    if "dropless" in name:
        assert all(u.sums["overflow_expert1"] == 0 for u in updates)
    elif "K=2" in name and "E=2" not in name:
        assert all(u.sums["overflow_expert2"] > 0 for u in updates)
