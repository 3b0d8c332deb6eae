"""A run that resumes on another number of ranks says how to keep the size of its updates."""

import re

import pytest
from omegaconf import OmegaConf

from fairseq_tutel.integrations.fairseq.trainer.update_size import other_update_size


def line(saved, saved_by, now, ranks):
    """Advice to a run with other (--batch-size, --max-tokens, --update-freq) on other ranks."""
    saved, now = (
        {"dataset": {"batch_size": size, "max_tokens": tokens},
         "optimization": {"update_freq": [passes]}}
        for size, tokens, passes in (saved, now)
    )  # fmt: skip
    return other_update_size({"cfg": saved}, OmegaConf.create(now), saved_by, ranks)


PLAIN = (4, None, 1)


@pytest.mark.parametrize("saved, saved_by, now, ranks, words", [
    (PLAIN, 8, PLAIN, 2, "one of 2 has 8 .*: --update-freq 4 keeps 32"),
    (PLAIN, 2, PLAIN, 8, "one of 8 has 32 .*: --batch-size 1 keeps 8"),
    ((4, None, 4), 2, (4, None, 4), 8, "one of 8 has 128 .*: --update-freq 1 keeps 32"),
    ((None, 1024, 1), 8, (None, 512, 1), 4, "one of 4 has 2,048 .*: --update-freq 4 keeps 8,1"),
    ((None, 1024, 1), 2, (None, 1024, 1), 4, "one of 4 has 4,096 .*: --max-tokens 512 keeps 2"),
    (PLAIN, 4, PLAIN, 3, "--batch-size 5 comes nearest to 16"),
    # equal updates, or sizes that cannot be compared
    (PLAIN, 2, PLAIN, 2, None), (PLAIN, 8, (4, None, 4), 2, None),
    ((None, 512, 1), 2, PLAIN, 4, None),
])  # fmt: skip
def test_the_advice_keeps_the_size_of_an_update(saved, saved_by, now, ranks, words):
    said = line(saved, saved_by, now, ranks)
    assert said is None if words is None else re.search(words, said)
    if words is None:
        now = OmegaConf.create({"dataset": {"batch_size": 4}, "optimization": {"update_freq": [1]}})
        assert other_update_size({"cfg": None, "args": None}, now, 2, 4) is None
