"""The balance loss over the tokens of a rank, of all ranks, or of each sequence."""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe import MoEConfig, MoELayer

M, E, K = 6, 4, 2
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


def _on_ranks():
    rank, _ = process_world()
    x = tokens().split(TOKENS)[rank]
    share = TOKENS[rank] / sum(TOKENS)
    return {
        name: loss_and_gradient(make(balance_scope="global", **options), x, share)
        for name, options in CASES.items()
    }


def test_ranks_have_the_loss_and_gradient_of_one_process_with_all_tokens():
    found = run_ranks(_on_ranks, len(TOKENS))
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


def by_loops(prob, choices):
    """E * sum_e share of choices * mean probability, over lists."""
    total = 0.0
    for e in range(E):
        share = sum(row.count(e) for row in choices) / (len(choices) * len(choices[0]))
        total += share * sum(row[e] for row in prob) / len(prob)
    return E * total


@pytest.mark.parametrize("count", ["first", "all"])
@pytest.mark.parametrize("scope", ["rank", "sequence", "global"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_loss_is_that_of_its_definition(scope, count, training):
    layer = make(balance_scope=scope, balance_choices=count, top_k=K).train(training)
    x = tokens().view(4, 5, M)
    _, aux = layer(x, return_aux=True)
    prob = (x @ layer.gate.wg.weight.t()).softmax(-1)
    chosen = prob.topk(K).indices[..., : 1 if count == "first" else K]
    rows = zip(prob, chosen, strict=True)
    if scope != "sequence":
        rows = [(prob.flatten(0, 1), chosen.flatten(0, 1))]
    losses = [by_loops(p.tolist(), c.tolist()) for p, c in rows]
    assert aux.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert aux.prob_sum_E is None  # nothing is left to add


def test_the_gradient_of_sequences_is_that_of_their_mean():
    x = tokens().view(4, 5, M)
    loss, grad = loss_and_gradient(make(balance_scope="sequence"), x, 1.0)
    layer = make()
    for one in x:
        (layer(one, return_aux=True)[1].loss / 4).backward()
    assert rms_ratio(layer.gate.wg.weight.grad, grad) < 1e-12


def test_padding_counts_for_no_expert():
    x, pad = tokens(), torch.arange(sum(TOKENS)) % 3 == 0
    losses = [
        make(balance_scope=scope, use_pad_mask=True)(x, pad_mask=pad, return_aux=True)[1].loss
        for scope in ("rank", "sequence", "global")
    ]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    assert losses[2].item() == pytest.approx(losses[0].item(), rel=1e-12)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"balance_scope": "world"}, ["balance_scope='world'", "rank, global, sequence"]),
        ({"balance_choices": "second"}, ["balance_choices='second'", "first, all"]),
        (
            {"balance_scope": "global", "load_importance_loss": True, "gate_noise": 1.0},
            ["load_importance_loss", "balance_scope='global'"],
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        MoEConfig(num_experts=E, **options)
    assert all(word in str(error.value) for word in words)
