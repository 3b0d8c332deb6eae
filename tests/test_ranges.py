"""Ranges of numbers, and what the layer's options and the launcher's do with them."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from fairseq_tutel.config import MoEConfig
from fairseq_tutel.launch.cli import build_parser
from fairseq_tutel.ranges import (
    FINITE,
    FRACTION,
    Range,
    as_argument,
    at_least,
    check_ranges,
    one_of,
    ranges_of,
)

NOT_FINITE = (math.nan, math.inf, -math.inf)


def outside(allowed: Range) -> list[float]:
    """Numbers that are not in a range: beyond each end, and an open end itself."""
    ends = ((allowed.low, allowed.low_open, -1), (allowed.high, allowed.high_open, 1))
    return [
        number
        for end, is_open, beyond in ends
        if math.isfinite(end)
        for number in ((end + beyond, end) if is_open else (end + beyond,))
    ]


def inside(allowed: Range) -> list[float]:
    """Numbers that are in a range: its ends if closed, and some between."""
    if allowed.only:
        return list(allowed.only)
    low, high = max(allowed.low, -1e6), min(allowed.high, 1e6)
    middle = [low + share * (high - low) for share in (0.25, 0.5)]
    closed = [] if allowed.low_open else [low]
    return middle + closed + ([] if allowed.high_open else [high])


@pytest.mark.parametrize(
    "allowed, text",
    [
        (FINITE, "a finite number"),
        (FRACTION, "at least 0 and at most 1"),
        (at_least(3), "at least 3"),
        (one_of(1, 2, 4), "one of 1, 2, 4"),
        (Range(high=1), "at most 1"),
        (Range(0, 1, low_open=True, high_open=True), "above 0 and below 1"),
    ],
)
def test_a_range_holds_what_its_text_states(allowed, text):
    assert str(allowed) == text
    for number in (*NOT_FINITE, *outside(allowed)):
        assert number not in allowed, number
    for number in inside(allowed):
        assert number in allowed, number


def test_all_wrong_options_are_in_one_line():
    @dataclass
    class Options:
        noise: float = field(default=0.0, metadata={"range": at_least(0)})
        betas: str = field(default="(0.9, 0.98)", metadata={"range": FRACTION})
        learning_rate: tuple = field(default=(0.1,), metadata={"range": at_least(0)})
        depth: int | None = field(default=None, metadata={"range": at_least(1)})
        name: str = "no range"

    check_ranges(Options(), ranges_of(Options))
    check_ranges(SimpleNamespace(noise=1), ranges_of(Options))  # what is absent is not checked
    wrong = Options(math.nan, "(0.9, 1.5)", (0.1, -0.5), 0)
    with pytest.raises(ValueError) as caught:
        check_ranges(wrong, ranges_of(Options))
    assert str(caught.value) == (
        "--noise nan must be a finite number; --betas (0.9, 1.5) must be at least 0 and at most 1; "
        "--learning-rate (0.1, -0.5) must be at least 0; --depth 0 must be at least 1"
    )
    with pytest.raises(ValueError, match="^noise=-1 must be at least 0$"):
        check_ranges(Options(-1), ranges_of(Options), as_argument)


@pytest.mark.parametrize("name", ranges_of(MoEConfig))
def test_the_layers_options_keep_to_their_ranges(name):
    good = MoEConfig(num_experts=2, top_k=1, gate_noise=0.5)
    allowed = ranges_of(MoEConfig)[name]
    assert getattr(good, name) in allowed
    for number in outside(allowed):
        with pytest.raises(ValueError, match=f"{name}={number} must be"):
            replace(good, **{name: number})
    for number in NOT_FINITE:
        with pytest.raises(ValueError, match=f"{name}={number}"):
            replace(good, **{name: number})


def test_every_number_among_the_layers_options_has_a_range():
    numbers = {name for name, f in MoEConfig.__dataclass_fields__.items()
               if f.type in ("int", "float")}  # fmt: skip
    assert numbers == set(ranges_of(MoEConfig))


@pytest.mark.parametrize(
    "option, value, objection",
    [
        ("--grace-seconds", "-1", "-1 must be at least 0"),
        ("--grace-seconds", "nan", "nan must be a finite number"),
        ("--grace-seconds", "inf", "inf must be a finite number"),
        ("--grace-seconds", "soon", "'soon' is not a number"),
        ("--agree-seconds", "-1", "-1 must be at least 0"),
        ("--nnodes", "0", "0 must be at least 1"),
        ("--node-rank", "-1", "-1 must be at least 0"),
        ("--master-port", "0", "0 must be at least 1"),
        ("--master-port", "1.5", "'1.5' is not a whole number"),
    ],
)
def test_the_launchers_options_keep_to_their_ranges(option, value, objection, capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([option, value, "--", "true"])
    assert caught.value.code == 2
    assert f"argument {option}: {objection}" in capsys.readouterr().err
