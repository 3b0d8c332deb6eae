"""Translation on 2 and 4 ranks equals one rank, and generation does not depend on the batch.

As of language models (test_equivalence.py), with sources and targets of different lengths, so that
both are padded, and experts in one stack or both.
"""

import functools

import pytest
import torch
from fairseq import tasks, utils
from fairseq.sequence_generator import SequenceGenerator
from helpers.distributed import run_ranks
from helpers.equivalence import assert_trained_like_one
from helpers.training import gradients, make_trainer, named, record_updates
from helpers.translation import make_pairs, own_pairs, pair_config

from fairseq_tutel.distributed import process_world

UPDATES = 3
DROPLESS = "--moe-capacity-factor 0"
CASES = {
    "E=4 drops, masked": "--use-moe-pad-mask --moe-freq 1",
    "E=4 dropless, update-freq 2": f"{DROPLESS} --checkpoint-activations --ddp-backend pytorch_ddp "
    "--moe-cmr --cmr-gate-loss-wt 0.1 --cmr-gate-loss-p 0.8",
    "E=4 in groups": "--moe-overflow-rerouting 1 --moe-capacity-factor 0.6 --moe-wire-compact",
    "E=2 in slices": f"{DROPLESS} --encoder-moe-freq 1 --moe-expert-placement sliced",
    "E=8 2dh, overlap": "--moe-exchange 2dh --moe-overlap-degree 2 "
    "--moe-gate-loss-scope sequence --moe-gate-loss-over unpadded --use-moe-pad-mask",
    "E=4 wire": f"{DROPLESS} --moe-wire fp16",
    "E=4 load bias, top-1": "--moe-top1-expert --moe-load-bias sign --decoder-moe-freq 1",
}


@functools.cache
def configs():
    return {
        name: pair_config("--clip-norm", "0.5", "--moe-expert-count", name[2], *words.split())
        for name, words in CASES.items()
    }


def _train(cases):
    """Per case: every update's record, gradients of the last, weights at the end."""
    found = {}
    for name, cfg in cases.items():
        if "in groups" in name:  # half of the ranks hold all experts
            cfg.model.moe_expert_parallel_size = max(1, process_world()[1] // 2)
        if "2dh" in name and process_world()[1] == 4:
            cfg.model.moe_ranks_per_node = 2
        trainer = make_trainer(cfg, make_pairs(0))
        updates = record_updates(trainer)
        for update in range(UPDATES):
            trainer.train_step(own_pairs(update, 8 if "update-freq 2" in name else 4))
        assert len(updates) == UPDATES
        found[name] = (updates, [gradients(trainer)], named(trainer))
    return found


@functools.cache
def trained(world_size):
    return run_ranks(_train, world_size, configs(), timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_like_one(name, world_size):
    ((one,), ranks) = ([found[name] for found in trained(size)] for size in (1, world_size))
    if "wire" in name:  # rows are rounded on their way
        for updates, *_ in ranks:
            for got, want in zip(updates, one[0], strict=True):
                assert got.sums["loss"] == pytest.approx(want.sums["loss"], rel=2e-3)
                assert (
                    0
                    < got.sums["moe_wire_error_dispatch"]
                    < 1e-3 * got.sums["moe_wire_layers_dispatch"]
                )
        return
    sliced = configs()[name].model.moe_expert_count if "in slices" in name else 0
    assert_trained_like_one(one, ranks, sliced)
    losses = [update.sums["loss"] / update.sample_size for update in one[0]]
    assert losses[-1] < 0.97 * losses[0]
    dropped = sum(update.sums["overflow_expert2"] for update in one[0])
    assert (dropped > 0) == ("--moe-capacity-factor 0 " not in CASES[name] and "top-1" not in name)


def _translate(model, task, batch, beam):
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_b=12)
    return generator.generate([model], {"net_input": {**batch["net_input"]}})


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("mask", [(), ("--use-moe-pad-mask",)])
def test_a_translation_does_not_depend_on_its_batch(mask, beam):
    """With a capacity that drops most pairs in validation."""
    words = ("--moe-expert-count", "4", "--moe-freq", "1", "--moe-eval-capacity-factor", "0.25")
    cfg = pair_config(*words, *mask)
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(5)
    model = task.build_model(cfg.model).eval()
    batch = make_pairs(7, source=(7, 5, 3, 9, 6, 2, 8, 4), target=(6, 4, 9, 3, 8, 5, 7, 2))

    def dropped():
        with torch.no_grad():
            _, extra = model(**batch["net_input"])
        return sum(int((aux.load_E - aux.num_kept_per_expert_E).sum()) for aux in extra["moe"])

    assert dropped() > 0
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    assert dropped() == 0  # as in fairseq-generate --score-reference
    together = _translate(model, task, batch, beam)
    sources = batch["net_input"]["src_tokens"]
    lengths = batch["net_input"]["src_lengths"]
    seen = set()
    for i, of_batch in enumerate(together):
        alone = {"src_tokens": sources[i : i + 1, -lengths[i] :], "src_lengths": lengths[i : i + 1]}
        (of_one,) = _translate(model, task, {"net_input": alone}, beam)
        for ours, theirs in zip(of_one, of_batch, strict=True):
            assert ours["tokens"].tolist() == theirs["tokens"].tolist()
            assert float(ours["score"]) == pytest.approx(float(theirs["score"]), abs=1e-5)
        seen.add(tuple(of_one[0]["tokens"].tolist()))
    assert len(seen) > 2  # the model does not say the same of all


def _generate_on_ranks():
    cfg = pair_config("--moe-expert-count", "4")
    model = tasks.setup_task(cfg.task).build_model(cfg.model).eval()
    source = make_pairs(1)["net_input"]
    with pytest.raises(ValueError, match="experts of this model are spread over"):
        model.encoder(source["src_tokens"], src_lengths=source["src_lengths"])


def test_generation_on_ranks_that_share_experts_is_refused():
    run_ranks(_generate_on_ranks, 2)
