"""Who gets the slots of a full expert, and re-routing, against loops over tokens."""

import math

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.routing import route

from fairseq_tutel.moe import MoEConfig, MoELayer, utilisation
from fairseq_tutel.moe.utilisation import routing_counts

T, E = 29, 6
CASES = {
    "top1": {"top_k": 1, "overflow_rerouting": 3},
    "top2": {"overflow_rerouting": 2},
    "top2, more rounds than experts": {"overflow_rerouting": 9},
    "top3, padding": {"top_k": 3, "overflow_rerouting": 2, "pad": True},
    "top2 prioritised": {"overflow_rerouting": 2, "batch_prioritized": True},
    "top2 normalised before": {"overflow_rerouting": 3, "normalize_before_dropping": True},
    "top2 ragged": {"overflow_rerouting": 2, "capacity_factor": -0.8},
    "top2 sigmoid, load bias": {
        "overflow_rerouting": 2,
        "score_function": "sigmoid",
        "load_bias": "quantile",
    },
    "top2 load bias": {"overflow_rerouting": 1, "load_bias": "quantile"},
    "top2 by probability": {"drop_policy": "probability"},
    "top1 by probability": {"top_k": 1, "drop_policy": "probability", "overflow_rerouting": 2},
    "top3 by probability, rerouted": {
        "top_k": 3,
        "drop_policy": "probability",
        "overflow_rerouting": 2,
        "pad": True,
    },
    "top2 at random": {"drop_policy": "random"},
    "top2 at random, rerouted": {"drop_policy": "random", "overflow_rerouting": 2},
    "no capacity": {"capacity_factor": 0.0, "overflow_rerouting": 2},
}


def set_up(name, seed):
    options = {"capacity_factor": 0.8, "eval_capacity_factor": 0.8, **CASES[name]}
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(T, E, dtype=torch.float64, generator=generator)
    logits[:, 1] += 2
    pad = None
    if options.pop("pad", False):
        pad = torch.rand(T, generator=generator) < 0.3
        options["use_pad_mask"] = True
    config = MoEConfig(E, **options)
    bias = None if config.load_bias == "none" else torch.linspace(-1, 1, E).double()
    return config, logits.requires_grad_(), pad, bias


def by_loops(config, logits, pad, bias, training, seed):
    """Weights [T, E] with gradient, pairs that found their expert full, by token after token."""
    top_k = config.top_k
    score = logits.softmax(1) if config.score_function == "softmax" else logits.sigmoid()
    key = logits.detach() if config.score_function == "softmax" else score.detach()
    key = key if bias is None else key + bias
    order = key.argsort(1, descending=True).tolist()
    gate = score.detach()
    factor = config.capacity_factor if training else config.eval_capacity_factor
    room = top_k * int(abs(factor) * math.ceil(T / E)) if factor else T * E
    torch.manual_seed(seed)
    drawn = torch.rand(T, dtype=torch.float64)
    tokens = [t for t in range(T) if pad is None or not pad[t]]

    def first(pairs):
        """(token, expert, k) in the order in which they take slots; the sort is stable."""
        if config.batch_prioritized:
            return sorted(pairs, key=lambda p: -gate[p[0], order[p[0]][0]])
        if config.drop_policy == "random" and training:
            return sorted(pairs, key=lambda p: -drawn[p[0]])
        if config.drop_policy == "probability":
            return sorted(pairs, key=lambda p: -gate[p[0], p[1]])
        return pairs

    if config.drop_policy == "probability":
        rounds = [[(t, order[t][k], k) for t in tokens for k in range(top_k)]]
    else:
        rounds = [[(t, order[t][k], k) for t in tokens] for k in range(top_k)]
    taken, place, lost = [0] * E, {}, []
    for pairs in rounds:
        for t, e, k in first(pairs):
            if taken[e] < room:
                place[t, k] = e
                taken[e] += 1
            else:
                lost.append((t, k))
    full = [sum(k == j for _, k in lost) for j in range(top_k)]
    for r in range(top_k, min(top_k + config.overflow_rerouting, E)):
        trying = {}
        for t, k in sorted(lost):
            trying.setdefault(t, k)
        for t, e, k in first([(t, order[t][r], k) for t, k in trying.items()]):
            if taken[e] < room:
                place[t, k] = e
                taken[e] += 1
                lost.remove((t, k))
    rows = []
    for t in range(T):
        mine = {k: e for (token, k), e in place.items() if token == t}
        total = sum(score[t, e] for e in mine.values())
        if config.normalize_before_dropping:
            total = sum(score[t, e] for e in order[t][:top_k])
        row = [torch.zeros((), dtype=torch.float64)] * E
        for e in mine.values():
            row[e] = score[t, e] / (1 if top_k == 1 else total)
        rows.append(torch.stack(row))
    return torch.stack(rows), full, taken, len(tokens)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_tokens(name, training):
    for seed in range(3):
        config, logits, pad, bias = set_up(name, seed)
        want, full, taken, tokens = by_loops(config, logits, pad, bias, training, seed)
        torch.manual_seed(seed)
        routing, aux = route(logits, config, training, pad_T=pad, load_bias_E=bias)
        weight_TK = routing.topk_weight_TK
        got = weight_TK.new_zeros(T, E)
        got = got.scatter_add(1, routing.expert_TK.clamp(min=0).long(), weight_TK)
        assert rms_ratio(got, want) < 1e-12
        target = torch.randn(T, E, dtype=torch.float64)
        grads = [torch.autograd.grad((target * w).sum(), logits)[0] for w in (got, want)]
        assert rms_ratio(*grads) < 1e-12
        assert routing.num_kept_per_expert_E.tolist() == taken
        # rows are taken by one pair each, and a token's experts are different
        rows = routing.dest_row_TK[routing.kept_TK]
        assert len(rows.unique()) == len(rows) == sum(taken)
        for experts, kept in zip(routing.expert_TK, routing.kept_TK, strict=True):
            assert len(experts[kept].unique()) == int(kept.sum())
        # metrics of overflow are those of the first try
        assert aux.load_E.sum() == tokens * config.top_k
        if config.top_k > 1:
            metrics = aux.metrics_dict()
            for k in (0, 1):
                percent = 100 * full[k] / tokens
                assert metrics[f"overflow_expert{k + 1}"] == pytest.approx(percent, rel=1e-5)
    if config.capacity_factor:
        assert sum(full) > 0


def test_rerouting_leaves_fewer_pairs_without_an_expert():
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    drops = []
    for rounds in (0, 1, 4):
        layer = MoELayer(16, 16, 8, seed=1, overflow_rerouting=rounds)
        torch.manual_seed(1)
        torch.nn.init.normal_(layer.gate.wg.weight, std=0.5)
        _, aux = layer(x, return_aux=True)
        drops.append(utilisation(routing_counts([aux], layer.groups)).drop.item())
    assert drops[0] > 15 and drops[2] < 0.5 * drops[1] < 0.4 * drops[0]


def test_random_drops_differ_between_steps_and_not_in_evaluation():
    config, logits, *_ = set_up("top2 at random", 0)
    kept = {
        training: [route(logits, config, training)[0].kept_TK for _ in range(2)]
        for training in (True, False)
    }
    assert not torch.equal(*kept[True]) and torch.equal(*kept[False])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"drop_policy": "last"}, ["drop_policy='last'", "position, probability, random"]),
        ({"overflow_rerouting": -1}, ["overflow_rerouting=-1 must be at least 0"]),
        ({"overflow_rerouting": 1.5}, ["overflow_rerouting=1.5 must be a whole number"]),
        (
            {"drop_policy": "random", "batch_prioritized": True},
            ["batch_prioritized", "drop_policy='random'"],
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        MoEConfig(E, **options)
    assert all(word in str(error.value) for word in words)
