"""A run that resumes on another number of ranks says how to keep the size of its updates."""

import pytest
from omegaconf import OmegaConf

from fairseq_tutel.integrations.fairseq.trainer.update_size import other_update_size


def _options(words):
    """--batch-size, --update-freq and --max-tokens of a run, as fairseq stores them."""
    given = {"batch_size": None, "max_tokens": None, "update_freq": [1]}
    flags = words.split()
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        name = flag[2:].replace("-", "_")
        given[name] = [int(value)] if name == "update_freq" else int(value)
    return {"optimization": {"update_freq": given.pop("update_freq")}, "dataset": given}


def _in_update(words, ranks):
    """The most sentences, or tokens, of an update."""
    options = _options(words)
    return ranks * options["optimization"]["update_freq"][-1] * max(
        value or 0 for value in options["dataset"].values()
    )  # fmt: skip


@pytest.mark.parametrize(
    "saved, saved_by, now, ranks, advice",
    [
        ("--batch-size 4", 8, "--batch-size 4", 2, "--update-freq 4"),
        ("--batch-size 4", 2, "--batch-size 4", 8, "--batch-size 1"),
        ("--batch-size 4 --update-freq 4", 2, "--batch-size 4 --update-freq 4", 8,
         "--update-freq 1"),
        ("--max-tokens 1024", 8, "--max-tokens 512", 4, "--update-freq 4"),
        ("--max-tokens 1024", 2, "--max-tokens 1024", 4, "--max-tokens 512"),
    ],
)  # fmt: skip
def test_the_advice_keeps_the_size_of_an_update(saved, saved_by, now, ranks, advice):
    line = other_update_size(
        {"cfg": _options(saved)}, OmegaConf.create(_options(now)), saved_by, ranks
    )
    wanted = _in_update(saved, saved_by)
    assert line.endswith(f"{advice} keeps {wanted:,}") and f"has {_in_update(now, ranks):,}" in line
    flag, value = advice.split()
    words = now.split()
    if flag in words:
        words[words.index(flag) + 1] = value
    else:
        words += [flag, value]
    followed = " ".join(words)
    assert _in_update(followed, ranks) == wanted
    cfg = OmegaConf.create(_options(followed))
    assert other_update_size({"cfg": _options(saved)}, cfg, saved_by, ranks) is None


def test_nothing_is_said_where_it_cannot_be_known():
    cfg = OmegaConf.create(_options("--batch-size 4"))
    assert other_update_size({"cfg": _options("--batch-size 4")}, cfg, 2, 2) is None
    assert other_update_size({"cfg": None, "args": None}, cfg, 2, 4) is None
    assert other_update_size({"cfg": _options("--max-tokens 512")}, cfg, 2, 4) is None


def test_what_no_option_keeps_exactly():
    cfg = OmegaConf.create(_options("--batch-size 4"))
    line = other_update_size({"cfg": _options("--batch-size 4")}, cfg, 4, 3)
    assert line.endswith("--batch-size 5 comes nearest to 16")
