"""``--moe-load-bias`` in training: one move per update, alike on all ranks, kept in checkpoints."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from helpers.distributed import run_ranks
from helpers.training import make_batch, make_config, make_trainer, own_batches, save
from omegaconf import open_dict

from fairseq_tutel.distributed import process_world

CASES = {
    "quantile": "--moe-load-bias quantile",
    "sign, sigmoid, recompute": "--moe-load-bias sign --moe-load-bias-rate 0.05 "
    "--moe-score-function sigmoid --checkpoint-activations",
    "quantile, drops, balance": "--moe-load-bias quantile --moe-capacity-factor 0.5 --moe-top-k 1 "
    "--moe-gate-loss-scope global --moe-batch-prioritized-routing",
}
UPDATES, BATCHES = 3, 4


def bias_of(trainer):
    return trainer.get_model().decoder.layers[1].moe_layer.gate.load_bias


def _train(cfgs, path):
    """The bias after every update; evaluation leaves it, and a set is saved at the end."""
    found = {}
    for number, (name, cfg) in enumerate(cfgs.items()):
        trainer = make_trainer(cfg)
        found[name] = [bias_of(trainer).clone()]
        for update in range(UPDATES):
            trainer.train_step(own_batches(update, BATCHES))
            found[name].append(bias_of(trainer).clone())
        trainer.valid_step(make_batch(99))
        assert torch.equal(bias_of(trainer), found[name][-1])
        save(trainer, f"{path}/{number}-{process_world()[1]}.pt", 12)
    return found


def _resume(cfgs, path, saved_by):
    found = {}
    for number, (name, cfg) in enumerate(cfgs.items()):
        cfg.common.seed = 77
        cfg.checkpoint.save_dir = path
        trainer = make_trainer(cfg)
        trainer.load_checkpoint(f"{path}/{number}-{saved_by}.pt")
        found[name] = bias_of(trainer).clone()
    return found


def test_it_is_the_same_on_all_ranks_and_goes_through_checkpoints(tmp_path):
    cfgs = {
        name: make_config("--moe-expert-count", "4", *words.split())
        for name, words in CASES.items()
    }
    runs = {w: run_ranks(_train, w, cfgs, str(tmp_path), timeout=120) for w in (1, 2, 4)}
    for name in CASES:
        (one,) = (found[name] for found in runs[1])
        assert not one[0].any() and all((a != b).any() for a, b in zip(one, one[1:], strict=False))
        for ranks in runs.values():
            for found in ranks:
                # from equal weights to the bit; later the weights themselves differ by rounding
                assert torch.equal(found[name][1], one[1]), name
                for got, want, mine in zip(found[name], one, ranks[0][name], strict=True):
                    assert torch.equal(got, mine)
                    torch.testing.assert_close(got, want, rtol=0.1, atol=0.01)
    for saved_by, world_size in ((4, 1), (1, 2)):
        for found in run_ranks(_resume, world_size, cfgs, str(tmp_path), saved_by):
            for name in CASES:
                assert torch.equal(found[name], runs[saved_by][0][name][-1]), name


def _overflow(cfg):
    """(updates, bias) after every step; the loss scale is too large at first."""
    trainer = make_trainer(cfg)
    assert bias_of(trainer).dtype == torch.float32
    assert next(trainer.get_model().parameters()).dtype == torch.float16
    seen = []
    while trainer.get_num_updates() < 2 and len(seen) < 24:
        step = len(seen)
        trainer.train_step(own_batches(step, 2))
        seen.append((trainer.get_num_updates(), bias_of(trainer).clone()))
    return seen


def test_an_update_that_overflowed_leaves_it():
    words = "--moe-expert-count 4 --moe-load-bias quantile --fp16 --fp16-init-scale 1048576"
    for seen in run_ranks(_overflow, 2, make_config(*words.split())):
        updates = [number for number, _ in seen]
        assert updates[0] == 0 and updates[-1] == 2
        before = torch.zeros(4)
        for number, (done, bias) in zip([0, *updates], seen, strict=False):
            assert torch.equal(bias, before) == (done == number)
            before = bias


def test_a_criterion_that_loses_the_counts_is_refused():
    cfg = make_config("--moe-expert-count", "4", *CASES["quantile"].split())
    with open_dict(cfg):
        cfg.criterion = CrossEntropyCriterionConfig(_name="cross_entropy")
    with pytest.raises(ValueError, match="--moe-load-bias quantile needs --criterion moe_cross"):
        make_trainer(cfg)
