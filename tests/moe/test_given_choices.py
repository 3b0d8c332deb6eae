"""Given choices: weights and rows by an fp64 loop; a replay has the bits of the recorded run."""

import pytest
import torch
from helpers import naive
from helpers.distributed import run_ranks
from helpers.layers import M, make_layer, tokens_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

E, T = 5, 23
CASES = [
    {"capacity_factor": 0.5, "second_expert_policy": "sampling"},
    {"capacity_factor": 0.5, "second_expert_policy": "random", "normalize_before_dropping": True},
    {"capacity_factor": 0.5, "overflow_rerouting": 2, "gate_noise": 0.5},
    {"capacity_factor": 0.0, "null_experts": 2, "load_bias": "quantile"},
    {"capacity_factor": 0.7, "balance_over": "all", "batch_prioritized": True},
    {"capacity_factor": 0.0, "score_function": "sigmoid", "load_bias": "sign", "top_k": 3},
    {"num_expert_groups": 5, "top_groups": 3, "top_k": 1, "group_score": "max"},
]


def a_pass(layer, x, seed=1, **call):
    torch.manual_seed(seed)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, aux = layer(x, return_aux=True, **call)
    (y.square().sum() + aux.loss).backward()
    grads = [param.grad for param in layer.parameters()]
    counts = [aux.num_routed_KE, aux.num_chosen_KE, aux.bias_counts]
    return [y, aux.loss, x.grad, torch.rand(3), *grads, *counts]


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", CASES)
def test_a_replay_has_the_bits_of_the_run_that_was_recorded(options):
    torch.manual_seed(0)
    layer = MoELayer(M, E, 8, **options)
    x, call = torch.randn(T, M), {"pad_mask": torch.rand(T) < 0.2}
    with training.record_choices(layer) as choices:
        recorded = a_pass(layer, x, **call)
    assert choices[""].shape == (T, layer.config.top_k)
    assert same(recorded, a_pass(layer, x, choices=choices[""], **call))
    with training.replay_choices(layer, choices), training.record_choices(layer) as again:
        assert same(recorded, a_pass(layer, x, **call))
    assert torch.equal(choices[""], again[""])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("capacity", [None, 4])
def test_foreign_choices_are_a_loop_over_tokens(weighted, capacity):
    """Gaps, padding and capacity; in fp64, with the gradient of the gate or of the weights."""
    layer = make_layer(
        build_groups(E), capacity_factor=0.0 if capacity is None else capacity * E / T / 2
    )
    x = torch.randn(T, M, dtype=torch.float64, requires_grad=True)
    pad = torch.arange(T) % 7 == 3
    choices = torch.rand(T, E).argsort(1)[:, :2]
    choices[::4, 0], choices[5, 1] = -1, -1
    weights = torch.rand(T, 2, dtype=torch.float64, requires_grad=True) if weighted else None
    got = layer(x, choices=choices, weights=weights, pad_mask=pad)
    expert = choices.masked_fill(pad[:, None], -1)
    slot, count_KE = naive.assign_slots(expert, E, None)
    assert capacity is None or max(map(sum, zip(*count_KE, strict=True))) > capacity
    gate = weights
    if not weighted:
        gate = layer.gate.wg(x).softmax(1).gather(1, choices.clamp(min=0))
    options = {"capacity": capacity, "padded": False, "normalize": not weighted}
    _, _, weight, _ = naive.assign_rows(expert, torch.tensor(slot), gate, E, **options)
    fc1, b1, fc2, b2 = layer.experts.parameters()

    def network(x_M, e):
        return fc2[e] @ nn.functional.gelu(fc1[e] @ x_M + b1[e]) + b2[e]

    rows = [[weight[t, k] * network(x[t], expert[t, k]) for k in range(2)] for t in range(T)]
    want = torch.stack([one + two for one, two in rows])
    torch.testing.assert_close(got, want)
    inputs = [x, weights if weighted else layer.gate.wg.weight]
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)]
    torch.testing.assert_close(*grads)


def _on_ranks(sizes):
    """Record and replay two layers under activation checkpointing, with r and uneven tokens."""
    groups, options = build_groups(2, placement="sliced"), {"second_expert_policy": "sampling"}
    layers = [make_layer(groups, "padded", torch.float32, **options) for _ in range(2)]
    model = nn.Sequential(*layers)
    x, _, mine = tokens_of(sizes, dtype=torch.float32)

    def run():
        torch.manual_seed(5)
        model.zero_grad()
        y = x[mine].clone().requires_grad_()
        for layer in model:
            y = y + checkpoint(layer, y, use_reentrant=False, r=1)
        y.square().sum().backward()
        return [y, *(param.grad for param in model.parameters())]

    with training.record_choices(model) as choices:  # around the backward pass too
        recorded = run()
    assert list(choices) == ["0", "1"]
    with training.replay_choices(model, choices):
        replayed = run()
    return same(recorded, replayed), [len(each) for each in choices.values()]


def test_all_ranks_record_and_replay_under_activation_checkpointing():
    assert run_ranks(_on_ranks, 2, (9, 0)) == [(True, [9, 9]), (True, [0, 0])]


def test_the_choices_of_several_calls_are_replayed_in_turn():
    layer, x = MoELayer(M, E, 8, capacity_factor=0.0), torch.randn(3, T, M, requires_grad=True)

    def call(x):
        return torch.stack([layer(each) for each in x]).sum()

    with training.record_choices(layer) as choices:
        call(x)
    assert [each.shape for each in choices[""]] == [(T, 2)] * 3
    moved = {"": [(each + 1) % E for each in choices[""]]}
    (want,) = torch.autograd.grad(
        sum(layer(each, choices=c).sum() for each, c in zip(x, moved[""], strict=True)), x
    )
    for run in (call, lambda x: sum(checkpoint(layer, e, use_reentrant=False).sum() for e in x)):
        with training.replay_choices(layer, moved):
            y = run(x)
        torch.testing.assert_close(torch.autograd.grad(y, x), (want,))
    for words, run in (
        ("second call inside one", lambda: checkpoint(call, x, use_reentrant=False)),
        ("not called", lambda: call(x[:2])),
    ):
        with pytest.raises(RuntimeError, match=words), training.replay_choices(layer, moved):
            run()


@pytest.mark.parametrize("calls", [[(2, 3), (2, 4)], [(2, 3), (3, 1)], [(2, 3)]], ids=str)
def test_calls_that_are_no_generation_are_refused(calls):
    layer = MoELayer(M, E, 8)
    with training.record_choices(layer) as choices:
        for shape in calls:
            layer(torch.randn(*shape, M))
    with pytest.raises(ValueError, match="record all of generate"):
        training.choices_of_sequences(choices, (2, 6))


SHARES = [(1, "7,1,2"), (2, "3,1,1,1,0.5"), (3, "1"), (2, "1,0,1")]


@pytest.mark.parametrize("top_k, shares", SHARES)
@pytest.mark.parametrize("tokens", [0, 1, 29, 96])
def test_a_forced_load_has_its_shares_and_the_gates_weights(top_k, shares, tokens):
    """Counts by hand; the output is that of the same choices, given as an argument."""
    experts = 6 if shares == "1,0,1" else E
    numbers = [float(share) for share in shares.split(",")]
    load = [numbers[expert % len(numbers)] for expert in range(experts)]
    options = {"top_k": top_k, "capacity_factor": 0.0, "second_expert_policy": "random"}
    layer = MoELayer(M, experts, 8, **options, benchmark=True, force_load=shares)
    x = torch.randn(tokens, M)
    with training.record_choices(layer) as choices:
        forced = a_pass(layer, x)
    chosen = choices[""]
    counts = chosen.flatten().bincount(minlength=experts)
    for count, share in zip(counts.tolist(), load, strict=True):
        assert abs(count - share / sum(load) * top_k * tokens) < 1
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    free = MoELayer(M, experts, 8, **options)
    free.load_state_dict(layer.state_dict())
    assert same(forced, a_pass(free, x, choices=chosen))
    # neighbours do not all choose the same expert: their rows are not one block
    assert tokens < 29 or (chosen[1:, 0] != chosen[:-1, 0]).sum() > 5
