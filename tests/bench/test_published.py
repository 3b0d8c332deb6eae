"""The planner against what others measured: arXiv 2206.03382, and README.moe.md of fairseq's moe
branch (commit 1ef1612), whose runs it predicts with what that computed otherwise."""

import dataclasses

import pytest
import torch
from claims_dense import make_dense_plan, mask_flops, masks
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel.command_line import CONFIGS
from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.plan.compose import load_config
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.settings import read_settings

A100 = load_hardware(CONFIGS, "a100-80g")
META = load_hardware(CONFIGS, "a100-40g")
# GPUs -> (config, sequences per GPU, forward passes per update, words per second, predicted ones)
PUBLISHED = {
    8: ("meta_4.1b", 4, 1, 35.0e3, 35.1e3),
    32: ("meta_142b", 6, 2, 33e3, 45.6e3),
    64: ("meta_142b", 6, 2, 82e3, 89.6e3),
    128: ("meta_142b", 6, 2, 191e3, 177.0e3),
    512: ("meta_142b", 12, 1, 638e3, 638.0e3),
}
SMALL = [
    "model.decoder_layers=2", "model.decoder_embed_dim=64", "model.decoder_ffn_embed_dim=256",
    "model.decoder_attention_heads=4", "model.moe_expert_count=8", "task.tokens_per_sample=64",
    "dataset.batch_size=4",
]  # fmt: skip


def settings_of(name, overrides, gpus):
    return read_settings(load_config(CONFIGS, name, overrides), name, gpus=gpus)


def as_meta_ran_it(gpus):
    name, batch_size, update_freq, *_ = PUBLISHED[gpus]
    words = [f"model.moe_expert_count={gpus}", f"dataset.batch_size={batch_size}",
             f"optimization.update_freq=[{update_freq}]"]  # fmt: skip
    return make_dense_plan(settings_of(name, words, gpus), META)


def test_all_to_all_of_the_papers_table_2():
    """64K tokens per GPU, D = 4096, top-2, fp32: 189.1, 323.8 and 491.3 ms were measured.

    The formula counts bytes and messages; links at 90 % are the one thing assumed. At 256 GPUs it
    is a quarter too low: it knows nothing of congested switches (the paper's section 2.3).
    """
    links = dataclasses.replace(A100, link_efficiency=0.9)
    size = 2 * 65536 * 4096 * 4
    predicted = [4e3 * EXCHANGES.get("linear").predict(size, w, links) for w in (16, 64, 256)]
    assert predicted == pytest.approx([191, 335, 373], abs=0.6)
    errors = [p / m - 1 for p, m in zip(predicted, (189.1, 323.8, 491.3), strict=True)]
    assert [round(error, 2) for error in errors] == [0.01, 0.03, -0.24]


@pytest.mark.parametrize("gpus", PUBLISHED)
def test_published_speeds_with_one_set_of_efficiencies(gpus):
    """The predictions stand in plan/README.md: a change of the planner changes them on purpose."""
    plan, (*_, measured, predicted) = as_meta_ran_it(gpus), PUBLISHED[gpus]
    assert plan.fits and plan.tokens_per_second == pytest.approx(predicted, rel=2e-3)
    assert gpus == 32 or predicted == pytest.approx(measured, rel=0.15)
    if gpus == 8:  # at most 10.4 GiB were allocated
        assert plan.memory.peak == pytest.approx(10.4 * 2**30, rel=0.1)


@pytest.mark.long
def test_why_the_speed_on_32_gpus_is_not_predicted():
    """What is paid per GPU is the same on 32 and on 128, what is paid for the network grows: 128
    cannot be predicted to be faster per GPU, as the published speeds are (1031, 1492 words/s)."""
    of_32, of_128 = (as_meta_ran_it(gpus) for gpus in (32, 128))
    assert of_32.work.tokens == of_128.work.tokens
    assert of_32.work.hardware_flops == pytest.approx(of_128.work.hardware_flops, rel=0.001)
    assert of_32.tokens_per_second / 32 >= 0.98 * of_128.tokens_per_second / 128
    assert of_32.tokens_per_second / PUBLISHED[32][3] == pytest.approx(1.38, abs=0.02)


def test_products_with_the_masks_are_counted_as_they_are_computed():
    recomputing = settings_of("meta_1.1t", SMALL, 8)
    settings = recomputing.replace(model={"checkpoint_activations": False})
    tokens, dim = settings.tokens, settings.model.decoder_embed_dim
    slots = settings.routing.num_experts * settings.routing.capacity(tokens, training=True)
    assert masks(settings) == tokens * slots
    x = torch.randn(tokens, dim, requires_grad=True)
    combine = torch.rand(tokens, slots, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        rows = (combine > 0.9).to(x.dtype).t().mm(x)  # no gradient for a mask of booleans
        combine.mm(rows).sum().backward()
    assert mask_flops(settings) == counter.get_total_flops() / tokens
    # recomputes the two of the forward pass
    assert mask_flops(recomputing) == pytest.approx(7 / 5 * mask_flops(settings))
