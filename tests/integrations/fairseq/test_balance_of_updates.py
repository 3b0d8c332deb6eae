"""``--moe-gate-loss-scope update`` with ``--update-freq 2``, beside a loop over tokens in fp64."""

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.training import (
    gradients,
    make_batch,
    make_config,
    make_trainer,
    own_batches,
    record_updates,
)

from fairseq_tutel.moe.torch_modes import in_backward

E, FREQ = 4, 2
WORDS = f"--moe-expert-count {E} --moe-capacity-factor 0 --moe-gate-loss-scope update"
CASES = ["", "--checkpoint-activations"]


def _train(cfgs):
    """By case: the logits of each pass, and the gate loss of each update over all ranks."""
    found = {}
    for words, cfg in cfgs.items():
        trainer, logits = make_trainer(cfg), []
        updates = record_updates(trainer)

        def watch(module, inputs, output, logits=logits):
            if not in_backward():
                logits.append((inputs[0] @ module.weight.t()).detach().double())

        (layer,) = trainer.get_model().moe_layers.values()
        layer.gate.register_forward_hook(lambda gate, *args, w=watch: w(gate.wg, *args))
        for update in range(2):
            trainer.train_step(own_batches(update, 4))
            trainer.valid_step(make_batch(99))  # does not count
            del logits[-1]
        found[words] = logits, [update.sums["moe_loss"] for update in updates]
    return found


def by_hand(logits_by_rank):
    """The gate loss of an update, summed over passes and ranks with their tokens as weights."""
    pairs, number, total = [0] * E, 0, 0.0
    for logits_of_ranks in zip(*logits_by_rank, strict=True):
        for logits_TE in logits_of_ranks:
            for expert in logits_TE.argmax(1).tolist():
                pairs[expert] += 1
                number += 1
        for logits_TE in logits_of_ranks:
            for prob_E in logits_TE.softmax(1):
                total += E * sum(c / number * float(p) for c, p in zip(pairs, prob_E, strict=True))
    return total


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gate_loss_sees_all_micro_batches_of_the_update_so_far(ranks):
    cfgs = {words: make_config(*WORDS.split(), *words.split()) for words in CASES}
    by_rank = run_ranks(_train, ranks, cfgs)
    for words in CASES:
        losses = by_rank[0][words][1]
        passes = 4 // ranks
        for update, loss in enumerate(losses):
            part = slice(update * passes, (update + 1) * passes)
            logits = [found[words][0][part] for found in by_rank]
            assert loss == pytest.approx(by_hand(logits), rel=1e-5), words
            alone = sum(by_hand([each]) for each in zip(*logits, strict=True))
            assert loss != pytest.approx(alone, rel=1e-4)  # and not what each pass has by itself


def test_equal_micro_batches_are_one_large_batch():
    """Loss and gradients, with a gate loss that is most of the loss."""
    cfg = make_config(*WORDS.split(), "--moe-gate-loss-wt", "50")
    batch, results = make_batch(5), []
    large = {**make_batch(5), "nsentences": 8, "ntokens": 2 * batch["ntokens"]}
    large["target"] = torch.cat([batch["target"]] * 2)
    large["net_input"] = {k: torch.cat([v] * 2) for k, v in batch["net_input"].items()}
    for samples in ([batch, batch], [large]):
        trainer = make_trainer(cfg)
        updates = record_updates(trainer)
        trainer.train_step(samples)
        results.append((updates[0].sums["loss"], updates[0].grad_norm, gradients(trainer)))
    (loss, norm, grads), (want, want_norm, want_grads) = results
    assert loss == pytest.approx(want, rel=1e-6) and norm == pytest.approx(want_norm, rel=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
