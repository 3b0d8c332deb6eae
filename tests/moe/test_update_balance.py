"""The balance loss over the load of a whole update: all its micro-batches, on all ranks."""

import itertools
import logging

import pytest
import torch
from helpers.distributed import run_ranks
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.recomputation import recalled

M, E = 6, 4
# tokens of the two ranks in each micro-batch; one with none
SIZES = [(5, 9), (7, 4), (0, 6)]


def make(**options):
    torch.manual_seed(1)
    options = {"capacity_factor": 0, "seed": 3, "z_loss_weight": 0.1, **options}
    layer = MoELayer(M, E, 8, balance_scope="update", **options).double()
    with torch.no_grad():
        layer.gate.wg.weight.mul_(4)
    return layer


def micro_batches():
    """x of each rank by micro-batch, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(size, M, generator=generator, dtype=torch.float64) for size in sizes]
        for sizes in SIZES
    ]


def loss_of_pass(layer, x, way):
    """The aux loss of one forward pass; other ways, in one process: training/test_passes.py."""
    if way == "collected":
        with training.collect_aux(layer) as aux:
            layer(x)
        return aux.loss
    report = lambda x: layer(x, return_aux=True)[1].loss  # noqa: E731
    return report(x) if way == "returned" else checkpoint(report, x, use_reentrant=False)


def _updates(way, count, together=False):
    """By update: losses of this rank's passes, and the gate's gradient of their sum."""
    rank, _ = process_world()
    layer, found = make(balance_choices=count), []
    for _ in range(2):
        layer.zero_grad()
        losses = []
        for by_rank in micro_batches():
            losses.append(loss_of_pass(layer, by_rank[rank], way))
            if not together:
                losses[-1].backward()
        if together:  # the recomputation of early passes comes after late passes
            sum(losses).backward()
        training.end_update(layer)
        found.append(([loss.item() for loss in losses], layer.gate.wg.weight.grad.clone()))
    return found


CASES = [("collected", "all", False), ("returned", "first", False), ("collected", "first", True),
         ("recomputed", "first", False), ("recomputed", "first", True)]  # fmt: skip


def _all_cases():
    return {case: _updates(*case) for case in CASES}


def by_hand(rank, count):
    """Losses of a rank's passes, and the gate's gradient of their sum."""
    weight = make().gate.wg.weight.detach().clone().requires_grad_()
    pairs_E, losses = torch.zeros(E, dtype=torch.float64), []
    for by_rank in micro_batches():
        best = (torch.cat(by_rank) @ weight.t()).topk(1 if count == "first" else 2).indices
        pairs_E = pairs_E + best.flatten().bincount(minlength=E)
        logits_TE = by_rank[rank] @ weight.t()
        prob_E = logits_TE.softmax(1).sum(0) / max(1, len(logits_TE))
        z_loss = logits_TE.logsumexp(1).square().sum() / max(1, len(logits_TE))
        losses.append(E * prob_E @ pairs_E / pairs_E.sum() + 0.1 * z_loss)
    sum(losses).backward()
    return [loss.item() for loss in losses], weight.grad


def test_a_pass_is_balanced_by_the_load_of_the_update_up_to_it():
    for rank, cases in enumerate(run_ranks(_all_cases, 2)):
        for (way, count, together), updates in cases.items():
            losses, grad = by_hand(rank, count)
            for got, got_grad in updates:  # the second update does not see the first
                assert got == pytest.approx(losses, rel=1e-12), (way, together)
                torch.testing.assert_close(got_grad, grad, msg=f"{way} {together}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_recomputation_recalls_the_calls_of_one_key_in_order(reentrant):
    values, seen = itertools.count(), []

    def call(x):
        seen.append([recalled("key", lambda: next(values)) for _ in range(2)])
        return x.exp()

    y = checkpoint(call, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert seen == 3 * [[0, 1]]


def test_evaluation_is_balanced_by_its_own_load_and_counts_nothing():
    layer, x = make(), torch.randn(40, M, dtype=torch.float64)
    before = layer(x, return_aux=True)[1].loss
    layer.eval()
    layer(x[:3], return_aux=True)
    layer.train()
    assert layer(x, return_aux=True)[1].loss.item() == pytest.approx(before.item(), rel=1e-12)


def test_a_loop_that_never_ends_an_update_is_warned_once(caplog):
    caplog.set_level(logging.WARNING, logger="fairseq_tutel")
    layer = make().float()
    for step in range(1100):
        layer.update_load.add(torch.ones(E + 1, dtype=torch.int64))
        if step == 1000:
            assert not caplog.records
    (record,) = caplog.records
    assert "end_update" in record.getMessage()
