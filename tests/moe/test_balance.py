"""The balance loss over the tokens of a rank, of all ranks, or of each sequence.

Its definition on one rank: test_router.py.
"""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import StepAgreement, process_world
from fairseq_tutel.moe import MoELayer

M, E = 6, 4
TOKENS = (5, 0, 9, 6)  # of the four ranks
CASES = {
    f"{choices} {extra}": {"balance_choices": choices, "z_loss_weight": z, "top_k": k}
    for choices in ("first", "all")
    for extra, z, k in (("top2", 0.1, 2), ("top3", 0.0, 3))
}


def make(**options):
    torch.manual_seed(1)
    layer = MoELayer(M, E, 8, capacity_factor=0, seed=3, **options).double()
    with torch.no_grad():
        layer.gate.wg.weight.mul_(4)
    return layer


def tokens():
    return torch.randn(sum(TOKENS), M, generator=torch.Generator().manual_seed(2)).double()


def loss_and_gradient(layer, x, share):
    _, aux = layer(x, return_aux=True)
    loss = share * aux.loss
    loss.backward()
    return loss.detach(), layer.gate.wg.weight.grad


def _cases():
    rank, _ = process_world()
    x = tokens().split(TOKENS)[rank]
    share = TOKENS[rank] / sum(TOKENS)
    return {
        name: loss_and_gradient(make(balance_scope="global", **options), x, share)
        for name, options in CASES.items()
    }


def test_ranks_have_the_loss_and_gradient_of_one_process_with_all_tokens():
    """Collected, with a step, recomputed: test_model.py of fairseq's."""
    found = run_ranks(_cases, len(TOKENS))
    for name, options in CASES.items():
        loss, grad = loss_and_gradient(make(**options), tokens(), 1.0)
        assert sum(one[name][0] for one in found).item() == pytest.approx(loss.item(), rel=1e-12)
        assert rms_ratio(sum(one[name][1] for one in found), grad) < 1e-12, name
        # and not what each rank has by itself
        parts = [
            loss_and_gradient(make(**options), part, len(part) / len(tokens()))[0]
            for part in tokens().split(TOKENS)
        ]
        assert abs(sum(parts) - loss) > 1e-4


@pytest.mark.parametrize("scope", ["rank", "sequence", "global"])
def test_the_loss_is_that_of_the_tokens_that_are_there(scope):
    """Padding and its content change neither loss nor gradient, but by Meta's rule."""
    options = {"balance_choices": "all", "z_loss_weight": 0.1}
    x = tokens().view(4, 5, M)
    pad = torch.arange(5) >= torch.tensor([[5], [3], [2], [0]])
    lengths = (~pad).sum(1).tolist()
    parts = [one[:n] for one, n in zip(x, lengths, strict=True) if n]
    layer = make(**options)
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
        padded = make(balance_scope=scope, **options)
        inside = torch.where(pad[..., None], scale * x + 2, x)
        _, aux = padded(inside, pad_mask=pad, return_aux=True)
        assert aux.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        aux.loss.backward()
        assert rms_ratio(padded.gate.wg.weight.grad, layer.gate.wg.weight.grad) < 1e-12
    meta = make(balance_scope=scope, balance_over="all", **options)
    assert meta(x, pad_mask=pad, return_aux=True)[1].loss.item() != pytest.approx(loss.item())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
def test_over_the_longest_a_rank_counts_as_many_tokens_as_the_longest(top_k, training):
    """Meta's code appends zeros, which it masks, to the tokens of the other ranks."""
    x = tokens().view(20, M)
    pad = torch.arange(20) % 7 == 3
    options = {"top_k": top_k, "balance_over": "longest", "eval_capacity_factor": 1.0}
    layer = make(**options).train(training)
    step = StepAgreement(26)
    _, aux = layer(x, pad_mask=pad, step=step, return_aux=True)
    longer = torch.cat([x, x.new_zeros(6, M)]), torch.cat([pad, torch.ones(6).bool()])
    _, filled = layer(longer[0], pad_mask=longer[1], step=step, return_aux=True)
    assert aux.loss.item() == pytest.approx(filled.loss.item(), rel=1e-12)
    assert aux.metrics_dict() == pytest.approx(filled.metrics_dict(), rel=1e-6)
    assert aux.num_tokens == 26 and aux.load_E.sum() == top_k * int((~pad).sum())
    _, alone = layer(x, pad_mask=pad, return_aux=True)
    assert alone.loss.item() != pytest.approx(filled.loss.item(), rel=1e-3)
