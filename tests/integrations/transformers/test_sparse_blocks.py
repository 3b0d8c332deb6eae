"""A block built as transformers 5 builds its own, by their formula and without transformers."""

import pytest
import torch
from torch import nn

from fairseq_tutel.integrations.transformers import (
    SPARSE_BLOCKS,
    original_state_dict,
    replace_moe,
    restore_moe,
)
from fairseq_tutel.moe import MoELayer

E, K, M, F = 5, 3, 8, 6


class Gate(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.top_k, self.norm_topk_prob = nn.Parameter(torch.randn(E, M)), K, norm

    def forward(self, x):
        return (x @ self.weight.t(),)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.randn(E, M, F))
        self.act_fn = nn.SiLU()


class OlmoeSparseMoeBlock(nn.Module):
    """Token by token, expert by expert."""

    def __init__(self, norm=False):
        super().__init__()
        self.gate, self.experts = Gate(norm), Experts()

    def forward(self, x):
        out = torch.zeros_like(x)
        for place in range(len(x)):
            probs = self.gate(x[place])[0].softmax(-1)
            best = probs.argsort(descending=True)[:K].tolist()
            total = sum(probs[e] for e in best) if self.gate.norm_topk_prob else 1.0
            for e in best:
                both = self.experts.gate_up_proj[e] @ x[place]
                hidden = self.experts.act_fn(both[:F]) * both[F:]
                out[place] += probs[e] / total * (self.experts.down_proj[e] @ hidden)
        return out


class MySparseBlock(OlmoeSparseMoeBlock):
    pass


@pytest.mark.parametrize("norm", [False, True], ids=["as they are", "normalised"])
def test_the_layer_is_the_formula_and_leads_back(norm):
    model = nn.Sequential(nn.Linear(M, M), OlmoeSparseMoeBlock(norm)).double()
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


def test_a_class_of_ones_own(monkeypatch):
    model = nn.Sequential(nn.Linear(M, M), MySparseBlock())
    with pytest.raises(ValueError, match=r"^1 \(MySparseBlock\) cannot .*SPARSE_BLOCKS"):
        replace_moe(model)
    monkeypatch.setitem(SPARSE_BLOCKS, "MySparseBlock", lambda gate: False)
    x = torch.randn(11, M)
    want = model(x)
    replace_moe(model)
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_built_otherwise():
    wrong = OlmoeSparseMoeBlock()
    wrong.experts.down_proj = nn.Parameter(torch.randn(E, F, M))
    many = OlmoeSparseMoeBlock()
    many.experts = nn.ModuleList([nn.Linear(M, M) for _ in range(E)])
    half = OlmoeSparseMoeBlock()
    half.experts.down_proj = nn.Parameter(half.experts.down_proj.data.to(torch.int8), False)
    one = OlmoeSparseMoeBlock()
    for blocks, words in (
        ([wrong], r"1 \(OlmoeSparseMoeBlock\): shapes do not fit"),
        ([many], r"1 \(OlmoeSparseMoeBlock\) has .*, not experts.gate_up_proj"),
        ([half], r"1\.experts\.down_proj is quantised \(torch.int8\)"),
        ([one, one], "one sparse block stands at several places: 1, 2"),
    ):
        model = nn.Sequential(nn.Linear(M, M), *blocks)
        with pytest.raises(ValueError, match=words):
            replace_moe(model)
        assert list(model)[1:] == blocks
