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


@pytest.mark.parametrize(
    "saved, saved_by, now, ranks, words",
    [
        ((4, None, 1), 8, (4, None, 1), 2, "one of 2 has 8 .*: --update-freq 4 keeps 32"),
        ((4, None, 1), 2, (4, None, 1), 8, "one of 8 has 32 .*: --batch-size 1 keeps 8"),
        ((4, None, 4), 2, (4, None, 4), 8, "one of 8 has 128 .*: --update-freq 1 keeps 32"),
        ((None, 1024, 1), 8, (None, 512, 1), 4, "one of 4 has 2,048 .*: --update-freq 4 keeps 8,1"),
        ((None, 1024, 1), 2, (None, 1024, 1), 4, "one of 4 has 4,096 .*: --max-tokens 512 keeps 2"),
        ((4, None, 1), 4, (4, None, 1), 3, "--batch-size 5 comes nearest to 16"),
    ],
)
def test_the_advice_keeps_the_size_of_an_update(saved, saved_by, now, ranks, words):
    assert re.search(words, line(saved, saved_by, now, ranks))


def test_nothing_is_said_of_equal_updates_and_where_it_cannot_be_known():
    plain = (4, None, 1)
    assert line(plain, 2, plain, 2) is line(plain, 8, (4, None, 4), 2) is None
    assert line((None, 512, 1), 2, plain, 4) is None
    cfg = {"dataset": {"batch_size": 4}, "optimization": {"update_freq": [1]}}
    assert other_update_size({"cfg": None, "args": None}, OmegaConf.create(cfg), 2, 4) is None
