"""``--moe-gate-loss-scope update``, several batches per update; by hand: test_update_balance.py."""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import on_ranks
from helpers.training import gradients, make_batch, make_config, make_trainer, record_updates

from fairseq_tutel.distributed import process_world

# the gate loss is most of the loss
WORDS = "--moe-expert-count 4 --moe-capacity-factor 0 --moe-gate-loss-scope update "
WORDS += "--moe-gate-loss-wt 50"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("more", ["", "--checkpoint-activations"])
@on_ranks()
def test_equal_micro_batches_are_one_large_batch(world_size, more):
    """In both of two updates, beside validation: each counts its own tokens alone."""
    cfg = make_config(*WORDS.split(), *more.split())
    seed, results = 5 + process_world()[0], []
    batch, large = make_batch(seed), make_batch(seed, sentences=8)
    large["target"] = torch.cat([batch["target"]] * 2)
    large["net_input"] = {k: torch.cat([v] * 2) for k, v in batch["net_input"].items()}
    for samples in ([batch, batch], [large]):
        trainer = make_trainer(cfg)
        updates = record_updates(trainer)
        for _ in range(2):
            trainer.train_step(samples)
            trainer.valid_step(make_batch(99))
        results.append((updates, gradients(trainer)))
    (updates, grads), (want_updates, want_grads) = results
    for got, want in zip(updates, want_updates, strict=True):
        assert got.sums["loss"] == pytest.approx(want.sums["loss"], rel=1e-5)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
    for name, grad in want_grads.items():
        assert rms_ratio(grads[name], grad) < 1e-4 or name.endswith("k_proj.bias"), name
