"""No block of the data is left out without a word, and no word of a prompt."""

from types import SimpleNamespace

import pytest
import torch
from helpers.commands import ROOT

from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE
from fairseq_tutel.integrations.fairseq.programs import evaluation, generation


def test_the_perplexity_of_nothing_is_an_error():
    model = torch.nn.Linear(1, 1)
    model.moe_groups = ExpertParallelGroups(2)
    with pytest.raises(ValueError, match="no token was evaluated: the subset is empty"):
        evaluation.eval_lm(lambda *args: {"loss": 0.0}, [model], SimpleNamespace(pad=lambda: 1), [])


@pytest.mark.parametrize("word, hints", [("Upon", 1), ("\u2581Upon", 0)])
def test_a_prompt_of_words_that_the_dictionary_lacks_is_told_once(caplog, word, hints):
    """As from_pretrained without bpe= and sentencepiece_model= makes of every prompt.

    A text that has been split into pieces needs no hint of these.
    """
    folder, data = ROOT / "tests/golden/top2_world1/final", ROOT / "tests/golden/data_world1"
    with caplog.at_level("INFO"):
        lm = TransformerLMGPTMoE.from_pretrained(str(folder), "checkpoint_last.pt", str(data))
        assert "transformer_lm" not in caplog.text  # stock prints the whole config
        lm.encode("a")
        assert "<unk>" not in caplog.text
        lm.encode(f"a {word} zzz")
        lm.encode("zzz")
    assert caplog.text.count("2 of the 3 words of the text are not in the dictionary") == 1
    assert caplog.text.count(f"<unk> ({word!r}, 'zzz')") == 1
    assert caplog.text.count("--sentencepiece-model") == hints


def test_a_small_model_generates_on_one_thread_unless_the_user_says_otherwise(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small, large = torch.nn.Linear(16, 16), torch.nn.Linear(2048, 2048, device="meta")
    generation._limit_threads([small])
    assert chosen == [1]
    generation._limit_threads([small, large])
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    generation._limit_threads([small])
    assert chosen == [1]
