"""The balance loss over the tokens of a rank, a sequence, all ranks, or a whole update.

Its definition on one rank: test_router.py.
"""

import itertools
import logging

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import StepAgreement, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.recomputation import recalled

M, E = 6, 4
# tokens of the two ranks in each micro-batch, none and one of all among them
SIZES = [(5, 9), (7, 4), (0, 6), (1, 0)]


def make(**options):
    torch.manual_seed(1)
    options = {"capacity_factor": 0, "seed": 3, "z_loss_weight": 0.1, **options}
    layer = MoELayer(M, E, 8, **options).double()
    with torch.no_grad():
        layer.gate.wg.weight.mul_(4)
    return layer


def tokens(*shape):
    return torch.randn(*shape, M, generator=torch.Generator().manual_seed(2)).double()


def micro_batches():
    """x of each rank by micro-batch, the same on every rank."""
    x = iter(tokens(sum(map(sum, SIZES))).split([size for sizes in SIZES for size in sizes]))
    return [(next(x), next(x)) for _ in SIZES]


def loss_of_pass(layer, x, way):
    """The aux loss of one forward pass; other ways, in one process: training/test_passes.py."""
    if way == "collected":
        with training.collect_aux(layer) as aux:
            layer(x)
        return aux.loss
    report = lambda x: layer(x, return_aux=True)[1].loss  # noqa: E731
    return report(x) if way == "returned" else checkpoint(report, x, use_reentrant=False)


def _updates(scope, way, count, top_k, together):
    """By update: losses of this rank's passes, and the gate's gradient of their sum."""
    rank, _ = process_world()
    layer, found = make(balance_scope=scope, balance_choices=count, top_k=top_k), []
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


CASES = [
    *itertools.product(["global"], ["returned"], ["first", "all"], [2, 3], [False]),
    ("update", "collected", "all", 2, False), ("update", "returned", "first", 3, False),
    ("update", "collected", "first", 2, True), ("update", "recomputed", "first", 2, False),
    ("update", "recomputed", "all", 3, True),
]  # fmt: skip


def _all_cases():
    return {case: _updates(*case) for case in CASES}


def by_hand(rank, scope, count, top_k):
    """Losses of a rank's passes, and the gate's gradient of their sum."""
    weight = make().gate.wg.weight.detach().clone().requires_grad_()
    pairs_E, losses = torch.zeros(E, dtype=torch.float64), []
    for by_rank in micro_batches():
        best = (torch.cat(by_rank) @ weight.t()).topk(1 if count == "first" else top_k).indices
        pairs_E = best.flatten().bincount(minlength=E) + (pairs_E if scope == "update" else 0)
        logits_TE = by_rank[rank] @ weight.t()
        prob_E = logits_TE.softmax(1).sum(0) / max(1, len(logits_TE))
        z_loss = logits_TE.logsumexp(1).square().sum() / max(1, len(logits_TE))
        losses.append(E * prob_E @ pairs_E.double() / pairs_E.sum() + 0.1 * z_loss)
    sum(losses).backward()
    return [loss.item() for loss in losses], weight.grad


def test_a_pass_is_balanced_by_the_load_of_its_scope():
    """Of all ranks, or of the update up to it; collected, with a step: fairseq's test_model.py."""
    for rank, cases in enumerate(run_ranks(_all_cases, 2)):
        for (scope, way, count, top_k, together), updates in cases.items():
            losses, grad = by_hand(rank, scope, count, top_k)
            for got, got_grad in updates:  # the second update does not see the first
                assert got == pytest.approx(losses, rel=1e-12), (scope, way, together)
                assert rms_ratio(got_grad, grad) < 1e-12, (scope, way, together)


@pytest.mark.parametrize("scope", ["rank", "sequence", "global", "update"])
def test_the_loss_is_that_of_the_tokens_that_are_there(scope):
    """Padding and its content change neither loss nor gradient, but by Meta's rule."""
    x = tokens(4, 5)
    pad = torch.arange(5) >= torch.tensor([[5], [3], [2], [0]])
    lengths = (~pad).sum(1).tolist()
    parts = [one[:n] for one, n in zip(x, lengths, strict=True) if n]
    layer = make(balance_choices="all")
    if scope == "sequence":
        loss = 0
        for part in parts:
            aux = layer(part, return_aux=True)[1]
            z_loss = 0.1 * (part @ layer.gate.wg.weight.t()).logsumexp(1).square().mean()
            loss += (aux.loss - z_loss) / len(parts) + z_loss * len(part) / sum(lengths)
    else:
        loss = layer(torch.cat(parts), return_aux=True)[1].loss
    loss.backward()
    for scale in (1, 30):
        padded = make(balance_scope=scope, balance_choices="all")
        inside = torch.where(pad[..., None], scale * x + 2, x)
        _, aux = padded(inside, pad_mask=pad, return_aux=True)
        assert aux.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        aux.loss.backward()
        assert rms_ratio(padded.gate.wg.weight.grad, layer.gate.wg.weight.grad) < 1e-12
    meta = make(balance_scope=scope, balance_over="all", balance_choices="all")
    assert meta(x, pad_mask=pad, return_aux=True)[1].loss.item() != pytest.approx(loss.item())


@pytest.mark.parametrize(("top_k", "training"), [(1, True), (2, False)])
def test_over_the_longest_a_rank_counts_as_many_tokens_as_the_longest(top_k, training):
    """Meta's code appends zeros, which it masks, to the tokens of the other ranks."""
    x, pad, step = tokens(20), torch.arange(20) % 7 == 3, StepAgreement(26)
    options = {"top_k": top_k, "balance_over": "longest", "eval_capacity_factor": 1.0}
    layer = make(**options, z_loss_weight=0.0).train(training)
    _, aux = layer(x, pad_mask=pad, step=step, return_aux=True)
    longer = torch.cat([x, x.new_zeros(6, M)]), torch.cat([pad, torch.ones(6).bool()])
    _, filled = layer(longer[0], pad_mask=longer[1], step=step, return_aux=True)
    assert aux.loss.item() == pytest.approx(filled.loss.item(), rel=1e-12)
    assert aux.metrics_dict() == pytest.approx(filled.metrics_dict(), rel=1e-6)
    assert aux.num_tokens == 26 and aux.load_E.sum() == top_k * int((~pad).sum())
    _, alone = layer(x, pad_mask=pad, return_aux=True)
    assert alone.loss.item() != pytest.approx(filled.loss.item(), rel=1e-3)


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
    layer, x = make(balance_scope="update"), tokens(40)
    before = layer(x, return_aux=True)[1].loss
    layer.eval()(x[:3], return_aux=True)
    again = layer.train()(x, return_aux=True)[1].loss
    assert again.item() == pytest.approx(before.item(), rel=1e-12)


def test_a_loop_that_never_ends_an_update_is_warned_once(caplog):
    caplog.set_level(logging.WARNING, logger="fairseq_tutel")
    layer = make(balance_scope="update").float()
    for step in range(1100):
        layer.update_load.add(torch.ones(E + 1, dtype=torch.int64))
        assert step != 1000 or not caplog.records
    (record,) = caplog.records
    assert "end_update" in record.getMessage()
