"""``--moe-load-bias`` and skipped updates; ranks: test_equivalence.py, sets: test_resume.py."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from helpers.distributed import run_ranks
from helpers.training import make_batch, make_config, make_trainer, own_batches
from omegaconf import open_dict

WORDS = ("--moe-expert-count", "4", "--moe-load-bias", "quantile")


def _overflow(cfg):
    """(updates, bias) after every step; the loss scale is too large at first."""
    trainer = make_trainer(cfg)
    load_bias = trainer.get_model().decoder.layers[1].moe_layer.gate.load_bias
    assert load_bias.dtype == torch.float32
    assert next(trainer.get_model().parameters()).dtype == torch.float16
    seen = []
    while trainer.get_num_updates() < 2 and len(seen) < 24:
        trainer.train_step(own_batches(len(seen), 2))
        seen.append((trainer.get_num_updates(), load_bias.clone()))
        trainer.valid_step(make_batch(99))
        assert torch.equal(load_bias, seen[-1][1])
    return seen


def test_an_update_that_overflowed_and_validation_leave_it():
    cfg = make_config(*WORDS, "--fp16", "--fp16-init-scale", "1048576")
    for seen in run_ranks(_overflow, 2, cfg):
        updates = [number for number, _ in seen]
        assert updates[0] == 0 and updates[-1] == 2
        before = torch.zeros(4)
        for number, (done, bias) in zip([0, *updates], seen, strict=False):
            assert torch.equal(bias, before) == (done == number)
            before = bias


def test_a_criterion_that_loses_the_counts_is_refused():
    cfg = make_config(*WORDS)
    with open_dict(cfg):
        cfg.criterion = CrossEntropyCriterionConfig(_name="cross_entropy")
    with pytest.raises(ValueError, match="--moe-load-bias quantile needs --criterion moe_cross"):
        make_trainer(cfg)
