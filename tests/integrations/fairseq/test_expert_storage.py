"""``moe_expert_dtype`` and ``moe_map_experts`` of a checkpoint that is evaluated."""

import math
import sys
from pathlib import Path

import pytest
import torch
from helpers.commands import ROOT
from helpers.training import make_config, make_trainer

from fairseq_tutel.checkpoint import io
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

FOLDER, DATA = ROOT / "tests/golden/top2_world2/final", ROOT / "tests/golden/data_world2"


def load(**options):
    lm = TransformerLMGPTMoE.from_pretrained(
        str(FOLDER), "checkpoint_last.pt", str(DATA), **options
    )
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
    whole = perplexity(model)
    words = "the"
    text = lm.sample(words, beam=2, max_len_b=12)
    mapped = load(moe_map_experts=True)
    assert perplexity(mapped[1]) == pytest.approx(whole, rel=1e-5)
    assert mapped[0].sample(words, beam=2, max_len_b=12) == text
    numbers = sum(
        p.numel() for layer in model.moe_layers.values() for p in layer.experts.parameters()
    )
    for dtype, size in (("bf16", 2), ("int8", 1)):
        held = load(moe_expert_dtype=dtype)[1]
        assert perplexity(held) == pytest.approx(whole, rel=5e-3) and perplexity(held) != whole
        found = sum(layer.experts.num_bytes() for layer in held.moe_layers.values())
        assert found < 1.2 * size * numbers
        # no weight but experts' is touched
        own = dict(model.named_parameters())
        assert all(torch.equal(param, own[name]) for name, param in held.named_parameters())


def file_pages(folder):
    """kB by kind of this process's mappings of the folder's files."""
    found, ours = {"Rss": 0, "Anonymous": 0, "Private_Dirty": 0}, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:  # the first line of a mapping: addresses ... path
            ours = str(folder) in line
        elif ours and name in found:
            found[name] += int(rest.split()[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_experts_are_the_page_cache_s_own_pages():
    """Which all processes of a node share: none is copied when it is used."""
    _, model = load(moe_map_experts=True)
    perplexity(model)
    numbers = sum(
        p.numel() for layer in model.moe_layers.values() for p in layer.experts.parameters()
    )
    found = file_pages(FOLDER)
    assert found["Rss"] * 1024 >= 4 * numbers
    assert found["Anonymous"] == found["Private_Dirty"] == 0


def test_mapped_experts_are_not_read_at_the_start(monkeypatch):
    checked = []
    monkeypatch.setattr(io.Checksums, "check", lambda self, entries: checked.append(entries))
    load()
    assert any("experts" in name for entries in checked for name in entries)
    checked.clear()
    load(moe_map_experts=True)
    assert checked and not any("experts" in name for entries in checked for name in entries)


@pytest.mark.parametrize("words", ["--moe-expert-dtype int8", "--moe-map-experts"])
def test_training_is_refused(words):
    with pytest.raises(ValueError, match=f"{words} is for evaluation: train without it"):
        make_trainer(make_config("--moe-expert-count", "2", *words.split()))


def test_bad_choices_are_one_line():
    with pytest.raises(ValueError, match="--moe-expert-dtype bf16 or --moe-map-experts"):
        load(moe_expert_dtype="bf16", moe_map_experts=True)
    with pytest.raises(
        ValueError, match="override moe_expert_dtype='fp4': expected one of same, bf16, int8$"
    ):
        load(moe_expert_dtype="fp4")
    with pytest.raises(ValueError, match="mapped experts are whole"):
        load(moe_map_experts=True, moe_expert_placement="sliced")
