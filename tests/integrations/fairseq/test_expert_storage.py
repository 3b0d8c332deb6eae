"""``moe_expert_dtype`` and ``moe_map_experts`` of a checkpoint that is evaluated."""

import math

import pytest
import torch
from helpers.commands import ROOT

from fairseq_tutel.checkpoint import io
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

FOLDER, DATA = ROOT / "tests/golden/top2_world2/final", ROOT / "tests/golden/data_world2"


def load(**options):
    data = str(DATA)
    lm = TransformerLMGPTMoE.from_pretrained(str(FOLDER), "checkpoint_last.pt", data, **options)
    return lm, lm.models[0]


@torch.no_grad()
def perplexity(model):
    """Of the first tokens of the validation set, whose numbers are their frequencies' order."""
    tokens = torch.arange(4, 4 + 100).view(1, -1) % 60 + 4
    target = tokens.roll(-1, 1)
    scores = model(tokens)[0].double().log_softmax(-1).gather(2, target[..., None])
    return math.exp(-scores.mean())


def test_perplexity_and_bytes():
    lm, model = load()
    whole, how = perplexity(model), {"beam": 2, "max_len_b": 12}
    mapped = load(moe_map_experts=True)
    assert perplexity(mapped[1]) == pytest.approx(whole, rel=1e-5)
    assert mapped[0].sample("the", **how) == lm.sample("the", **how)
    experts = [p for layer in model.moe_layers.values() for p in layer.experts.parameters()]
    for dtype, size in (("bf16", 2), ("int8", 1)):
        held = load(moe_expert_dtype=dtype)[1]
        assert perplexity(held) == pytest.approx(whole, rel=5e-3) and perplexity(held) != whole
        found = sum(layer.experts.num_bytes() for layer in held.moe_layers.values())
        assert found < 1.2 * size * sum(p.numel() for p in experts)
        # no weight but experts' is touched
        own = dict(model.named_parameters())
        assert all(torch.equal(param, own[name]) for name, param in held.named_parameters())


def test_mapped_experts_are_not_read_at_the_start(monkeypatch):
    checked = []
    monkeypatch.setattr(io.Checksums, "check", lambda self, entries: checked.append(entries))
    load()
    assert any("experts" in name for entries in checked for name in entries)
    checked.clear()
    load(moe_map_experts=True)
    assert checked and not any("experts" in name for entries in checked for name in entries)


@pytest.mark.parametrize("options, message", [
    ({"moe_expert_dtype": "bf16", "moe_map_experts": True},
     "--moe-expert-dtype bf16 or --moe-map-experts"),
    ({"moe_expert_dtype": "fp4"},
     "override moe_expert_dtype='fp4': expected one of same, bf16, int8$"),
    ({"moe_map_experts": True, "moe_expert_placement": "sliced"}, "mapped experts are whole"),
])  # fmt: skip
def test_bad_choices_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)
