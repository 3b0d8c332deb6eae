"""Ranks that disagree raise an error at once; small agreements between all ranks."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.distributed import on_ranks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    StepAgreement,
    StepSettings,
    any_rank,
    build_groups,
    gather_texts,
    process_world,
    sum_over_ranks,
    sync_stacks,
    sync_step,
)
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops import ActivationMemory
from fairseq_tutel.training import add_lora, collect_aux

FOUR_CHUNKS: dict[str, Any] = {"exchange": ExchangeConfig(overlap_degree=4)}


@pytest.mark.parametrize("training", [True, False])
def test_an_agreement_holds_for_the_options_it_was_made_with(training):
    groups = build_groups(4)
    layer = MoELayer(8, 4, 8, groups=groups).train(training)
    x = torch.randn(6, 8)
    plain = sync_step(6, layer.step_settings(x.dtype), groups)
    for options, words in (
        ({"top_k": 4}, "make top_k 4, but the ranks' agreement for this step has 2"),
        ({"capacity_factor": 2.5}, "2.5, but .* has (1.0|0.0);"),
        ({"top_k": 2, "capacity_factor": 0.25}, "0.25, but"),
        ({"exchange": ExchangeConfig(overlap_degree=2)}, "overlap_degree 2, but .* has 1;"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x, step=plain, **options)
        step = sync_step(6, layer.step_settings(x.dtype, **options), groups)
        torch.testing.assert_close(layer(x, step=step, **options), layer(x, **options))
    narrow = sync_step(6, layer.step_settings(x.dtype, top_k=1), groups)
    with pytest.raises(ValueError, match="make top_k 2, but .* has 1;"):
        layer(x, step=narrow, top_k=2)
    # what the layer does anyway, another dtype than that of the agreement, and one made by hand
    layer(x, step=plain, top_k=2)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, step=plain, top_k=2)
    layer(x, step=StepAgreement(6), top_k=4)


@dataclass(frozen=True, kw_only=True)
class _MoreSettings(StepSettings):
    layout: str


def _disagree_on_a_new_setting():
    rank, _ = process_world()
    groups = build_groups(2)
    settings = vars(MoELayer(8, 2, 8, groups=groups).step_settings(torch.float32))
    same = _MoreSettings(**settings, layout="pairwise, é")
    assert sync_step(3 + rank, same, groups).num_tokens == 4
    other = _MoreSettings(**settings, layout="flat" if rank else "hierarchical")
    with pytest.raises(ValueError) as caught:
        sync_step(3, other, groups)
    assert str(caught.value).endswith(
        "disagree on layout: flat on ranks [1]; hierarchical on ranks [0]"
    )


def _two_stacks():
    """Counts of each in one exchange; widths that differ between the ranks are told apart."""
    rank, _ = process_world()
    groups = build_groups(2)
    narrow, wide = (
        MoELayer(dim, 2, 8, groups=groups).step_settings(torch.float32) for dim in (8, 12)
    )
    steps = sync_stacks([3 + rank, 9 - 2 * rank], [narrow, wide], groups)
    assert [step.num_tokens for step in steps] == [4, 9]
    assert [step.settings.model_dim for step in steps] == [8, 12]
    other = dataclasses.replace(wide, model_dim=12 + 4 * rank)
    with pytest.raises(ValueError, match="model_dim of stack 2: 12 on ranks .0.; 16 on ranks .1."):
        sync_stacks([3, 3], [narrow, other], groups)


BALANCED: dict[str, Any] = {"exchange": ExchangeConfig(balance_ranks=True, balance_min_rows=1)}
LEAN: dict[str, Any] = {"activation_memory": "lean"}
OVER_RANKS: dict[str, Any] = {"balance_scope": "global"}


def within(context, change=lambda layer: None, call=lambda layer, x: layer(x)):
    """Return the function that changes the layer and calls it within a context."""

    def changed(layer, x):
        change(layer)
        with context():
            return call(layer, x)

    return changed


def after(change):
    """Return the function that changes the layer before a call."""
    return within(contextlib.nullcontext, change)


def _collecting(layer, x):
    with collect_aux(layer) as aux:
        y = layer(x)
    return y + aux.loss


# what one rank does to the layer of its own, by name
_frozen = after(lambda layer: layer.experts.requires_grad_(False))
_hooked = after(lambda layer: layer.experts.register_forward_hook(lambda *args: None))
_counting_flops = within(lambda: FlopCounterMode(display=False))
_with_lora = after(lambda layer: add_lora(layer, freeze=False))
_minimal = after(lambda layer: setattr(layer.experts, "memory", ActivationMemory("minimal")))
_evaluated = within(torch.no_grad, lambda layer: layer.eval())
_asking = within(contextlib.nullcontext, call=lambda layer, x: layer(x, return_aux=True)[0])


def with_options(**options):
    return lambda layer, x: layer(x, **options)


# words of the message, options of the layer on both ranks, its call or more options on rank 1
STATES: list[tuple[str, dict[str, Any], Callable | dict]] = [
    ("top_k: 1 on ranks .1.; 2 on ranks .0.", {}, with_options(top_k=1)),
    ("top_k: 1 on ranks .1.; 2 on ranks .0.", {}, dict(top_k=1)),
    ("capacity_factor: 0.0 on ranks .0.; 1.0 on ranks .1.", {}, with_options(capacity_factor=1.0)),
    ("overlap_degree: 1 on ranks .0.; 4 on ranks .1.", {}, with_options(**FOUR_CHUNKS)),
    ("eval_capacity_factor: .* 2.0 on ranks .1.", {}, dict(eval_capacity_factor=2.0)),
    ("eval_capacity_token_fraction: 0.0 on .*; 0.25 on ranks .1.",
     {"eval_capacity_token_fraction": 0.0}, dict(eval_capacity_token_fraction=0.25)),
    ("balance_scope: global on ranks .1.; rank on ranks .0.", {}, dict(balance_scope="global")),
    ("model_dim: 8 on ranks .0.; 16 on ranks .1.", {}, dict(model_dim=16)),
    ("skip_exchange", {}, dict(skip_exchange=True)),
    ("gradients_of", {}, within(torch.no_grad)),
    ("gradients_of", {}, lambda layer, x: layer(x.detach())),
    ("gradients_of", LEAN, within(torch.no_grad)),
    ("gradients_of", {}, lambda layer, x: checkpoint(layer, x, use_reentrant=True)),
    ("checkpointing", {}, lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
    ("mode: evaluation on ranks .1.; training on", {}, lambda layer, x: layer.eval()(x)),
    ("dtype: .*bfloat16 on", {}, within(lambda: torch.autocast("cpu", torch.bfloat16))),
    ("activation_memory", LEAN, _minimal),
    ("activation_memory", {}, _minimal),
    ("activation_memory", LEAN, _hooked),
    ("activation_memory", LEAN, _counting_flops),
    ("activation_memory", FOUR_CHUNKS, _hooked),
    ("activation_memory", FOUR_CHUNKS, _counting_flops),
    ("experts", BALANCED, _frozen),
    ("experts", BALANCED, _with_lora),
    ("experts", BALANCED, after(lambda layer: layer.experts.eval())),
    ("experts", {"exchange": ExchangeConfig(r=0)}, _frozen),
    ("experts", {"exchange": ExchangeConfig(r=0)}, _with_lora),
    ("balance_loss", OVER_RANKS, _asking),
    ("balance_loss", OVER_RANKS, _collecting),
]  # fmt: skip


@on_ranks(2, timeout=150)
def test_what_one_rank_does_alone_is_refused_on_all():
    """Before anything moves."""
    rank, _ = process_world()
    for words, options, change in STATES:
        more = change if rank and isinstance(change, dict) else {}
        given = {"model_dim": 8, "capacity_factor": 0.0, "seed": 0, **options, **more}
        layer = MoELayer(num_experts=4, hidden_dim=8, **given)
        x = torch.randn(6, layer.model_dim).requires_grad_()
        words = words if ":" in words else f"{words}: .*on ranks"
        with pytest.raises(ValueError, match=f"^MoE ranks disagree on {words}"):
            change(layer, x) if rank and callable(change) else layer(x)
    if rank == 0:  # nothing is built inside a step, where a rank alone waits for the others
        with pytest.raises(ValueError, match="'2dh'.* was not built .*prepare_exchanges"):
            layer(x, exchange="2dh")
    # no input has a gradient, and one rank's experts are frozen
    layer = MoELayer(8, 4, 8, capacity_factor=0.0)
    with pytest.raises(ValueError, match="gradients_of: experts on ranks .0.; nothing on ranks .1"):
        _frozen(layer, torch.randn(6, 8)) if rank else layer(torch.randn(6, 8))
    layer, x = MoELayer(8, 4, 8), torch.randn(rank, 8)
    assert layer(x).shape == layer(x, top_k=1, **FOUR_CHUNKS).shape == x.shape  # again in step
    layer.prepare_exchanges(["2dh", "linear"])
    assert torch.equal(layer(x, exchange="2dh"), layer(x))
    _disagree_on_a_new_setting()
    _two_stacks()
    _differ_where_ranks_may()


def _differ_where_ranks_may():
    """What moves nothing may differ: gradients are those of equal ranks."""
    rank, _ = process_world()
    for options, change in (
        ({}, _frozen),
        ({}, _hooked),
        ({}, _counting_flops),
        ({}, _asking),
        (LEAN, _frozen),
        ({}, _evaluated),
        (BALANCED, _evaluated),
    ):
        results = []
        for call in (change if rank else lambda layer, x: layer(x), lambda layer, x: layer(x)):
            torch.manual_seed(0)
            layer = MoELayer(8, 4, 8, capacity_factor=0.0, seed=0, **options)
            layer.train(change is not _evaluated)
            torch.manual_seed(rank)
            x = torch.randn(40, 8).requires_grad_()
            y = call(layer, x)
            if change is not _evaluated:
                y.square().sum().backward()
            results.append(y.detach() if change is _evaluated else x.grad)
        torch.testing.assert_close(*results)


@on_ranks(4)
def test_blocks_and_small_agreements():
    """E < W: ranks exchange in blocks; the message has global ranks, the other block goes on."""
    rank, size = process_world()
    layer = MoELayer(8, 2, 8, groups=build_groups(2), top_k=1 if rank == 3 else 2)
    words = r"top_k: 1 on ranks \[3\]; 2 on ranks \[2\]"
    with contextlib.nullcontext() if rank < 2 else pytest.raises(ValueError, match=words):
        layer(torch.randn(3, 8))
    assert sync_step(10 * rank, None, build_groups(size)).num_tokens == 10 * (size - 1)
    texts = [None, "", "a b", "größe\n" * 50]
    assert gather_texts(texts[rank]) == texts
    assert gather_texts(None) == [None] * size
    assert gather_texts("same") == ["same"] * size
    cpu = torch.device("cpu")
    assert any_rank(rank == 2, cpu) is True
    assert any_rank(False, cpu) is False
    values = sum_over_ranks([0.1 * rank, 2.0**40 + rank], cpu)
    assert values == [pytest.approx(0.6), size * 2.0**40 + 6]  # fp64: nothing is rounded away
    _disagree_on_r()


def _disagree_on_r():
    rank, _ = process_world()
    groups = build_groups(2, placement="sliced")
    layer = MoELayer(8, 2, 8, groups=groups)
    x = torch.randn(6, 8)
    with pytest.raises(ValueError, match=r"disagree on r: 0 on ranks \[1\]; 1 on ranks \[0, 2"):
        layer(x, r=0 if rank == 1 else 1)
    step = sync_step(6, layer.step_settings(x.dtype, r=2), groups)
    with pytest.raises(ValueError, match="this call's options make r 0, but .* for this step has"):
        layer(x, step=step, r=0)
    layer(x, step=step, r=2)
    with pytest.raises(ValueError, match="8 hidden units .* cut into 3") as caught:
        MoELayer(8, 2, 8, groups=dataclasses.replace(groups, num_replicas=3))
    assert "\n" not in str(caught.value)
