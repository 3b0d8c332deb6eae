"""The shortest way of a few tokens: the bits of the usual one, and taken only where it may be."""

import itertools

import pytest
import torch

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer, layer

DIM = 32


@pytest.fixture
def taken(monkeypatch):
    """How often a layer took the short way."""
    calls = []

    def spy(*args):
        y = original(*args)
        calls.append(y is not None)
        return y

    original = layer.through_few
    monkeypatch.setattr(layer, "through_few", spy)
    return calls


def make(**options):
    options = {"top_k": 2, "capacity_factor": 1.0, "seed": 1, **options}
    torch.manual_seed(3)
    return MoELayer(DIM, 8, 4 * DIM, **options).eval()


@torch.no_grad()
def both(moe, x, **options):
    """(by the usual way, by the short one)"""
    return moe(x, return_aux=True, **options)[0], moe(x, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 3, "expert_network": "swiglu"},
        {"expert_network": "geglu", "expert_options": {"bias": True}},
        {"top_k": 8, "activation": "relu"},
        {"normalize_before_dropping": True},
        {"unnormalized_weights": True, "route_scale": 2.5},
        {"expert_output_masking": 0.2, "final_output_masking": 0.1, "shared_expert_dim": 16},
        {"router": "cosine", "gate_noise": 1.0, "input_jitter": 0.1, "drop_policy": "random"},
        {"second_expert_policy": "random", "balance_over": "all"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "top2",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_in_bits_to_the_usual_way(options, dtype, taken):
    moe = make(**options).to(dtype)
    for shape in ((1, 1), (3, 1), (1, 13), (4, 8)):
        x = torch.randn(*shape, DIM, dtype=dtype)
        mask = torch.rand(shape) < 0.3
        for pad_mask in (None, mask, torch.ones(shape, dtype=torch.bool)):
            usual, short = both(moe, x, pad_mask=pad_mask)
            assert torch.equal(usual, short) and usual.any() == short.any()
    assert taken == [True] * 12


def test_ties_and_logits_that_are_not_finite(taken):
    moe = make(top_k=3)
    with torch.no_grad():
        moe.gate.wg.weight.zero_()
    assert torch.equal(*both(moe, torch.randn(5, DIM)))  # the experts of the lowest numbers
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(4, DIM)
        x[1, 2] = value
        usual, short = both(make(), x)
        assert torch.equal(usual.isnan(), short.isnan())
        assert torch.equal(usual[[0, 2, 3]], short[[0, 2, 3]])
    assert taken and all(taken)


def test_no_tokens(taken):
    assert both(make(), torch.randn(0, 3, DIM))[1].shape == (0, 3, DIM)
    assert taken == [True]


def test_under_autocast(taken):
    moe, x = make(), torch.randn(3, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        usual, short = both(moe, x)
    assert torch.equal(usual, short) and usual.dtype == torch.bfloat16 and taken == [True]


def test_weights_that_were_moved_or_loaded_count():
    moe, other, x = make(), make(seed=7), torch.randn(2, DIM)
    both(moe, x)
    moe.load_state_dict(other.state_dict())
    assert torch.equal(both(moe, x)[1], both(other, x)[0])


class _Hooked:
    def __init__(self, part):
        self.part = part

    def __call__(self, moe):
        moe.get_submodule(self.part).register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "options, change",
    [
        ({"eval_capacity_token_fraction": 0.25}, None),
        ({"eval_capacity_factor": 2.0}, None),
        ({"load_bias": "sign"}, None),
        ({"score_function": "sigmoid"}, None),
        ({"null_experts": 2}, None),
        ({"batch_prioritized": True}, None),
        ({"drop_policy": "probability"}, None),
        ({"expert_fn": lambda: torch.nn.Linear(DIM, DIM)}, None),
        ({"gate": torch.nn.Linear(DIM, 8)}, None),
        ({}, _Hooked("gate")),
        ({}, _Hooked("experts")),
        ({}, lambda moe: moe.train()),
    ],
)
def test_other_layers_take_the_usual_way(options, change, taken):
    own = "expert_fn" in options
    moe = MoELayer(DIM, 8, top_k=2, **options).eval() if own else make(**options)
    if change is not None:
        change(moe)
    usual, again = both(moe, torch.randn(3, DIM))
    assert taken == [False] and torch.equal(usual, again)


def test_gradients_traces_and_many_tokens_take_the_usual_way(taken):
    moe, x = make(), torch.randn(2, DIM)
    moe(x).sum().backward()
    assert moe.experts.fc1_weight.grad.any()
    with torch.no_grad():
        moe(torch.randn(ops.few_tokens.MOST_PAIRS // 2 + 1, DIM))
        assert taken == [False, False]
        moe(torch.randn(ops.few_tokens.MOST_PAIRS // 2, DIM))
        assert taken.pop()
        exported = torch.export.export(moe, (x,)).module()
        assert torch.equal(exported(x), moe(x))
    assert taken == [False, False, False, True]


def test_a_call_with_a_capacity_of_its_own(taken):
    moe, x = make(eval_capacity_token_fraction=0.05), torch.randn(9, DIM)
    with torch.no_grad():
        usual = moe(x, return_aux=True, capacity_factor=0.0)[0]
        assert torch.equal(moe(x, capacity_factor=0.0), usual)
        assert not torch.equal(moe(x), usual)
    assert taken == [True, False]


def test_rows_of_an_expert_are_in_the_order_of_choices():
    """Against the definition: by expert, then choice, then token; padding has no row."""
    choice = torch.tensor([[2, 0], [0, 2], [1, 0], [2, 1]])
    few = ops.arrange_few(choice, torch.tensor([False, False, True, False]))
    pairs = [
        (e, k, t)
        for e, k, t in itertools.product(range(3), range(2), (0, 1, 3))
        if choice[t, k] == e
    ]
    assert few.token_R.tolist() == [t for *_, t in pairs]
    rows = {(t, k): row for row, (_, k, t) in enumerate(pairs)}
    assert few.dest_row_TK.tolist() == [[rows.get((t, k), -1) for k in range(2)] for t in range(4)]
    assert few.spans == [(0, 0, 2), (1, 2, 3), (2, 3, 6)]
