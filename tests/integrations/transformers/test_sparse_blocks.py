"""A block built as transformers 5 builds its own, by their formula and without transformers."""

import copy
import dataclasses

import pytest
import torch
from helpers.assertions import assert_same_state
from torch import nn
from torch.nn import functional

from fairseq_tutel.integrations.transformers import (
    SPARSE_BLOCKS,
    original_state_dict,
    replace_moe,
    restore_moe,
)
from fairseq_tutel.integrations.transformers.layers import ChosenExperts
from fairseq_tutel.integrations.transformers.replace import _DECIDED
from fairseq_tutel.moe import MoEConfig, MoELayer

E, K, M, F = 5, 3, 8, 6


class Gate(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.top_k, self.norm_topk_prob = nn.Parameter(torch.randn(E, M)), K, norm

    def forward(self, x):
        return (x @ self.weight.t(),)


class Probabilities(Gate):
    """As routers of transformers 5.0 to 5.5."""

    def forward(self, x):
        return (super().forward(x)[0].softmax(-1),)


class Experts(nn.Module):
    def __init__(self, number=E):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * F, M))
        self.down_proj = nn.Parameter(torch.randn(number, M, F))
        self.act_fn = nn.SiLU()

    def one(self, e, row):
        gate, up = (self.gate_up_proj[e] @ row).chunk(2)
        return self.down_proj[e] @ (self.act_fn(gate) * up)


class MySparseBlock(nn.Module):
    """Token by token, expert by expert; transformers' own blocks call their experts."""

    def __init__(self, norm=False, gate=Gate, extra=None):
        super().__init__()
        self.gate, self.experts = gate(norm), Experts()
        self.extra = extra or nn.Identity()  # of the output

    def probabilities(self, x):
        return self.gate(x)[0].softmax(-1)

    def forward(self, x):
        out = torch.zeros_like(x)
        for place in range(len(x)):
            probs = self.probabilities(x[place])
            best = probs.argsort(descending=True)[:K].tolist()
            total = sum(probs[e] for e in best) if self.gate.norm_topk_prob else 1.0
            for e in best:
                out[place] += probs[e] / total * self.experts.one(e, x[place])
        return self.extra(out)


class FromProbabilities(MySparseBlock):
    """It routes as MySparseBlock by a router that returns probabilities."""

    def probabilities(self, x):
        return self.gate(x)[0]


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    for kind in (MySparseBlock, FromProbabilities):
        monkeypatch.setitem(SPARSE_BLOCKS, kind.__name__, lambda gate: gate.norm_topk_prob)


@pytest.mark.parametrize("norm", [False, True], ids=["as they are", "normalised"])
def test_the_layer_is_the_formula_and_leads_back(norm):
    model = nn.Sequential(nn.Linear(M, M), MySparseBlock(norm)).double()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(11, M, dtype=torch.float64)
    want = model(x)
    blocks = replace_moe(model)
    assert isinstance(model[1], MoELayer)
    torch.testing.assert_close(model(x), want)
    assert_same_state(original_state_dict(model, blocks), before)
    restore_moe(model, blocks)
    assert_same_state(model.state_dict(), before)
    torch.testing.assert_close(model(x), want)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def without_router():
    block = MySparseBlock(extra=Doubled())
    nn.init.zeros_(block.gate.weight)
    return block


DIFFERENT = {
    "probabilities": lambda: FromProbabilities(gate=Probabilities),
    "scaled": lambda: MySparseBlock(extra=Doubled()),
    "normed": lambda: MySparseBlock(extra=nn.LayerNorm(M)),
    "dropout in training": lambda: MySparseBlock(extra=nn.Dropout(0.5)),
    "scaled, with a router of zeros": without_router,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_a_declared_block_that_computes_something_else_is_refused(make, dtype):
    model = nn.Sequential(nn.Linear(M, M), make()).to(dtype)
    block, state = model[1], torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"^1 \({type(block).__name__}\) .* something else than"):
        replace_moe(model)
    assert model[1] is block and torch.equal(state, torch.get_rng_state())


def test_an_undeclared_block_that_never_calls_its_experts_is_refused(monkeypatch):
    monkeypatch.delitem(SPARSE_BLOCKS, "MySparseBlock")
    model = nn.Sequential(nn.Linear(M, M), MySparseBlock())
    with pytest.raises(ValueError, match=r"^1 \(MySparseBlock\) cannot .*SPARSE_BLOCKS"):
        replace_moe(model)


class Called(Experts):
    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for token, choices in enumerate(index.tolist()):
            for place, e in enumerate(choices):
                out[token] += weights[token, place] * self.one(e, x[token])
        return out


class GroupedRouter(nn.Module):
    """As DeepSeek-V3's; AXK2 fills scores outside the best groups with 0, not -inf."""

    num_group, topk_group = 4, 2

    def __init__(self, fill):
        super().__init__()
        self.weight, self.fill = nn.Parameter(torch.randn(8, M)), fill
        self.register_buffer("correction_bias", torch.zeros(8))

    def forward(self, x):
        logits = functional.linear(x, self.weight)
        scores = logits.sigmoid()
        keys = (scores + self.correction_bias).view(-1, self.num_group, 2)
        best = keys.topk(2).values.sum(-1).topk(self.topk_group).indices
        inside = torch.zeros(len(x), self.num_group, dtype=torch.bool).scatter(1, best, True)
        index = keys.masked_fill(~inside[..., None], self.fill).flatten(1).topk(2).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index


class GroupedBlock(nn.Module):
    def __init__(self, fill=-torch.inf, name="gate"):
        super().__init__()
        self.add_module(name, GroupedRouter(fill))
        self.router, self.experts = (self.get_submodule(name),), Called(8)

    def forward(self, x):
        rows = x.flatten(0, -2)
        _, weights, index = self.router[0](rows)
        return self.experts(rows, index, self.given(weights, index)).view(x.shape)

    def given(self, weights, index):
        return weights


@pytest.mark.parametrize("fill", [-torch.inf, 0.0])
def test_experts_outside_the_best_groups_are_chosen_only_by_the_models_rule(fill):
    model = nn.Sequential(nn.Linear(M, M), GroupedBlock(fill))
    model[1].gate.correction_bias -= 1.5  # all scores are negative
    x = torch.randn(3, 11, M)
    want = model(x)
    replace_moe(model)
    layer = model[1] if fill else model[1].experts
    assert isinstance(layer, MoELayer) and isinstance(layer, ChosenExperts) == (not fill)
    torch.testing.assert_close(model(x), want)


class WeightsOfAll(GroupedBlock):
    """It gives its experts the weights [T, E], as some of transformers 5.0 do."""

    def given(self, weights, index):
        return torch.zeros(len(index), 8).scatter(1, index, weights)


def shared(name):
    """Two blocks with one experts module, or with one matrix; or a matrix that is used outside."""
    first, second = MySparseBlock(), MySparseBlock()
    if name == "experts":
        second.experts = first.experts
    elif name == "down_proj":
        second.experts.down_proj = first.experts.down_proj
    else:
        second = nn.Linear(F, M)
        second.weight = first.experts.down_proj
    return [first, second]


def with_down_proj(*shape, **options):
    block = MySparseBlock()
    param = nn.Parameter(torch.ones(*shape, **options), requires_grad=not options)
    block.experts.down_proj = param
    return [block]


def many():
    block = MySparseBlock()
    block.experts = nn.ModuleList([nn.Linear(M, M) for _ in range(E)])
    return [block]


REFUSED = {
    r"1 \(MySparseBlock\): shapes do not fit": lambda: with_down_proj(E, F, M),
    r"1 \(MySparseBlock\) has .*, not experts.gate_up_proj": many,
    r"1\.experts\.down_proj is quantised \(torch.int8\)":
        lambda: with_down_proj(E, M, F, dtype=torch.int8),
    r"choices and weights have the shapes .*8, 2.*8, 8": lambda: [WeightsOfAll()],
    r"1.experts shares weights with 2.experts": lambda: [MySparseBlock()] * 2,
    r"1.experts shares weights with 2.experts.gate_up": lambda: shared("experts"),
    r"1.experts shares weights with 2.experts.down_proj": lambda: shared("down_proj"),
    r"1.experts shares weights with 2.weight: they are tied": lambda: shared("outside"),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(words):
    blocks = REFUSED[words]()
    model = nn.Sequential(nn.Linear(M, M), *blocks)
    with pytest.raises(ValueError, match=words):
        replace_moe(model)
    assert list(model)[1:] == blocks


# an option of routing -> another value than its default; what some values need
OPTIONS = {
    "capacity_factor": 0.5, "eval_capacity_factor": 0.5, "eval_capacity_token_fraction": 0.1,
    "second_expert_policy": "random", "normalize_before_dropping": True, "batch_prioritized": True,
    "use_pad_mask": True, "gating_fp32": False, "gate_noise": 1.0, "input_jitter": 0.5,
    "input_dropout": 0.5, "z_loss_weight": 0.1, "load_importance_loss": True,
    "balance_scope": "update", "balance_choices": "all", "balance_over": "all", "load_bias": "sign",
    "load_bias_rate": 0.1, "drop_policy": "random", "overflow_rerouting": 1, "route_scale": 2.0,
    "expert_output_masking": 0.5, "final_output_masking": 0.5, "local_drop": 0.5,
    "benchmark": True, "force_load": "1",
}  # fmt: skip
NEEDS = {
    "load_importance_loss": {"gate_noise": 1.0}, "load_bias_rate": {"load_bias": "sign"},
    "force_load": {"benchmark": True},
}  # fmt: skip


def test_the_table_has_all_options_of_routing():
    fields = {field.name for field in dataclasses.fields(MoEConfig)}
    assert OPTIONS.keys() == fields - set(_DECIDED)


MAKE = {"block": lambda: MySparseBlock(True), "experts": lambda: GroupedBlock(name="chooser")}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_restored_block_computes_what_the_layer_did_or_is_refused(option, make):
    model, x = nn.Sequential(nn.Linear(M, M), make()).eval(), torch.randn(40, M)
    with torch.no_grad():
        dense = model(x)
        try:
            blocks = replace_moe(model, **{option: OPTIONS[option]}, **NEEDS.get(option, {}))
        except ValueError as error:
            assert option in str(error) and "goes on routing by itself: leave out" in str(error)
            return
        want = model(x)
        if torch.allclose(want, dense, atol=1e-5):
            restore_moe(model, blocks)
            torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
            return
    (layer,) = (each for each in model.modules() if isinstance(each, MoELayer))
    for back in (restore_moe, original_state_dict):
        with pytest.raises(ValueError, match=rf"has {option}=.*the original block cannot hold"):
            back(model, blocks)
    layer.config = dataclasses.replace(layer.config, **{option: getattr(MoEConfig, option)})
    restore_moe(model, blocks)
    torch.testing.assert_close(model(x), dense, rtol=1e-5, atol=1e-5)
