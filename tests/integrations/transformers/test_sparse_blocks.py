"""A block built as transformers 5 builds its own, by their formula and without transformers."""

import dataclasses

import pytest
import torch
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
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.randn(E, M, F))
        self.act_fn = nn.SiLU()


class MySparseBlock(nn.Module):
    """Token by token, expert by expert; transformers' own blocks call their experts."""

    def __init__(self, norm=False, gate=Gate):
        super().__init__()
        self.gate, self.experts = gate(norm), Experts()
        self.extra = nn.Identity()  # of the output

    def probabilities(self, x):
        return self.gate(x)[0].softmax(-1)

    def forward(self, x):
        out = torch.zeros_like(x)
        for place in range(len(x)):
            probs = self.probabilities(x[place])
            best = probs.argsort(descending=True)[:K].tolist()
            total = sum(probs[e] for e in best) if self.gate.norm_topk_prob else 1.0
            for e in best:
                both = self.experts.gate_up_proj[e] @ x[place]
                hidden = self.experts.act_fn(both[:F]) * both[F:]
                out[place] += probs[e] / total * (self.experts.down_proj[e] @ hidden)
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
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(11, M, dtype=torch.float64)
    want = model(x)
    blocks = replace_moe(model)
    assert isinstance(model[1], MoELayer)
    torch.testing.assert_close(model(x), want)
    names = {"1.gate.weight", "1.experts.gate_up_proj", "1.experts.down_proj"}
    state = original_state_dict(model, blocks)
    assert names < state.keys()
    restore_moe(model, blocks)
    for found in (state, model.state_dict()):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)
    torch.testing.assert_close(model(x), want)


def of(kind, **more):
    def make():
        block = kind()
        for name, module in more.items():
            setattr(block, name, module)
        return block

    return make


def without_router():
    block = MySparseBlock(norm=True)
    nn.init.zeros_(block.gate.weight)
    block.gate.norm_topk_prob = False
    block.extra = Doubled()
    return block


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


DIFFERENT = {
    "probabilities": lambda: FromProbabilities(gate=Probabilities),
    "scaled": of(MySparseBlock, extra=Doubled()),
    "normed": of(MySparseBlock, extra=nn.LayerNorm(M)),
    "dropout in training": of(MySparseBlock, extra=nn.Dropout(0.5)),
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
                gate, up = (self.gate_up_proj[e] @ x[token]).chunk(2)
                hidden = self.act_fn(gate) * up
                out[token] += weights[token, place] * (self.down_proj[e] @ hidden)
        return out


class GroupedRouter(nn.Module):
    """As DeepSeek-V3's; AXK2 fills scores outside the best groups with 0, not -inf."""

    num_group, topk_group, fill = 4, 2, -torch.inf

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, M))
        self.register_buffer("correction_bias", torch.zeros(8))

    def forward(self, x):
        logits = functional.linear(x, self.weight)
        scores = logits.sigmoid()
        keys = (scores + self.correction_bias).view(-1, self.num_group, 2)
        best = keys.topk(2).values.sum(-1).topk(self.topk_group).indices
        inside = torch.zeros(len(x), self.num_group, dtype=torch.bool).scatter(1, best, True)
        keys = keys.masked_fill(~inside[..., None], self.fill).flatten(1)
        index = keys.topk(2).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index


class GroupedBlock(nn.Module):
    def __init__(self, fill=-torch.inf, name="gate"):
        super().__init__()
        self.add_module(name, GroupedRouter())
        self.router, self.experts = (self.get_submodule(name),), Called()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(8, 2 * F, M))
        self.experts.down_proj = nn.Parameter(torch.randn(8, M, F))
        self.router[0].fill = fill

    def forward(self, x):
        rows = x.flatten(0, -2)
        _, weights, index = self.router[0](rows)
        return self.experts(rows, index, weights).view(x.shape)


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

    def forward(self, x):
        rows = x.flatten(0, -2)
        _, weights, index = self.router[0](rows)
        weights = torch.zeros(len(rows), 8).scatter(1, index, weights)
        return self.experts(rows, index, weights).view(x.shape)


def shared(*names):
    """Two blocks with one experts module, or with one matrix; or a matrix that is used outside."""

    def make():
        first, second = MySparseBlock(), MySparseBlock()
        if names == ("experts",):
            second.experts = first.experts
        elif names == ("down_proj",):
            second.experts.down_proj = first.experts.down_proj
        else:
            second = nn.Linear(F, M)
            second.weight = first.experts.down_proj
        return [first, second]

    return make


def with_experts(**more):
    def make():
        block = MySparseBlock()
        for name, value in more.items():
            setattr(block.experts, name, value)
        return [block]

    return make


def many():
    block = MySparseBlock()
    block.experts = nn.ModuleList([nn.Linear(M, M) for _ in range(E)])
    return [block]


REFUSED = {
    "shapes": (
        with_experts(down_proj=nn.Parameter(torch.randn(E, F, M))),
        r"1 \(MySparseBlock\): shapes do not fit",
    ),
    "modules": (many, r"1 \(MySparseBlock\) has .*, not experts.gate_up_proj"),
    "int8": (
        with_experts(down_proj=nn.Parameter(torch.ones(E, M, F, dtype=torch.int8), False)),
        r"1\.experts\.down_proj is quantised \(torch.int8\)",
    ),
    "weights of all": (
        lambda: [WeightsOfAll()], r"choices and weights have the shapes .*8, 2.*8, 8",
    ),
    "one block twice": (lambda: [MySparseBlock()] * 2, r"1.experts shares weights with 2.experts"),
    "one experts module": (shared("experts"), r"1.experts shares weights with 2.experts.gate_up"),
    "one matrix": (shared("down_proj"), r"1.experts shares weights with 2.experts.down_proj"),
    "one matrix outside": (shared(), r"1.experts shares weights with 2.weight: they are tied"),
}  # fmt: skip


@pytest.mark.parametrize("make, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(make, words):
    blocks = make()
    model = nn.Sequential(nn.Linear(M, M), *blocks)
    with pytest.raises(ValueError, match=words):
        replace_moe(model)
    assert list(model)[1:] == blocks


# an option of routing -> another value than its default, and what that value needs
OPTIONS = {
    "capacity_factor": {"capacity_factor": 0.5},
    "eval_capacity_factor": {"eval_capacity_factor": 0.5},
    "eval_capacity_token_fraction": {"eval_capacity_token_fraction": 0.1},
    "second_expert_policy": {"second_expert_policy": "random"},
    "normalize_before_dropping": {"normalize_before_dropping": True},
    "batch_prioritized": {"batch_prioritized": True},
    "use_pad_mask": {"use_pad_mask": True},
    "gating_fp32": {"gating_fp32": False},
    "gate_noise": {"gate_noise": 1.0},
    "input_jitter": {"input_jitter": 0.5},
    "input_dropout": {"input_dropout": 0.5},
    "z_loss_weight": {"z_loss_weight": 0.1},
    "load_importance_loss": {"load_importance_loss": True, "gate_noise": 1.0},
    "balance_scope": {"balance_scope": "update"},
    "balance_choices": {"balance_choices": "all"},
    "balance_over": {"balance_over": "all"},
    "load_bias": {"load_bias": "sign"},
    "load_bias_rate": {"load_bias": "sign", "load_bias_rate": 0.1},
    "drop_policy": {"drop_policy": "random"},
    "overflow_rerouting": {"overflow_rerouting": 1},
    "route_scale": {"route_scale": 2.0},
    "expert_output_masking": {"expert_output_masking": 0.5},
    "final_output_masking": {"final_output_masking": 0.5},
    "local_drop": {"local_drop": 0.5},
    "benchmark": {"benchmark": True},
    "force_load": {"force_load": "1", "benchmark": True},
}


def test_the_table_has_all_options_of_routing():
    fields = {field.name for field in dataclasses.fields(MoEConfig)}
    assert OPTIONS.keys() == fields - set(_DECIDED)


@pytest.mark.parametrize(
    "make",
    [lambda: MySparseBlock(norm=True), lambda: GroupedBlock(name="chooser")],
    ids=["block", "experts"],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_restored_block_computes_what_the_layer_did_or_is_refused(option, make):
    model, x = nn.Sequential(nn.Linear(M, M), make()).eval(), torch.randn(40, M)
    with torch.no_grad():
        dense = model(x)
        try:
            blocks = replace_moe(model, **OPTIONS[option])
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
