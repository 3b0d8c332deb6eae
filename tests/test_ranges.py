"""Ranges of numbers, and what the layer's options and the launcher's do with them."""

import math
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace

import pytest

import fairseq_tutel.moe  # noqa: F401  registers what is chosen by name
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.config.options import (
    FINITE,
    FRACTION,
    Range,
    as_argument,
    at_least,
    check_ranges,
)
from fairseq_tutel.launch.cli import build_parser

RANGES = {f.name: f.metadata["range"] for f in fields(MoEConfig) if f.metadata["range"]}
NOT_FINITE = (math.nan, math.inf, -math.inf)


def outside(allowed: Range) -> list[float]:
    """Numbers that are not in a range: beyond each end, and an open end itself."""
    ends = ((allowed.low, allowed.low_open, -1), (allowed.high, allowed.high_open, 1))
    beyond = [end + step for end, _, step in ends]
    itself = [end for end, is_open, _ in ends if is_open]
    return [number for number in (*beyond, *itself) if math.isfinite(number)] + list(NOT_FINITE)


def inside(allowed: Range) -> list[float]:
    """Numbers that are in a range: its ends if closed, and some between."""
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
        (Range(high=1), "at most 1"),
        (Range(0, 1, low_open=True, high_open=True), "above 0 and below 1"),
    ],
)
def test_a_range_holds_what_its_text_states(allowed, text):
    assert str(allowed) == text
    for number in outside(allowed):
        assert number not in allowed, number
    for number in inside(allowed):
        assert number in allowed, number


def test_all_wrong_options_are_in_one_line():
    @dataclass
    class Options:
        noise: float = field(default=0.0, metadata={"range": at_least(0)})
        share: float = field(default=0.5, metadata={"range": FRACTION})
        depth: int | None = field(default=None, metadata={"range": at_least(1)})
        name: str = "no range"

    check_ranges(Options(), Options)
    check_ranges(SimpleNamespace(noise=1), Options)  # what is absent is not checked
    with pytest.raises(ValueError) as caught:
        check_ranges(Options(math.nan, 1.5, 0), Options)
    assert str(caught.value) == (
        "--noise nan must be a finite number; --share 1.5 must be at least 0 and at most 1; "
        "--depth 0 must be at least 1"
    )
    with pytest.raises(ValueError, match="^noise=-1 must be at least 0$"):
        check_ranges(Options(-1), Options, as_argument)


@pytest.mark.parametrize("name", RANGES)
def test_the_layers_options_keep_to_their_ranges(name):
    good = MoEConfig(num_experts=2, top_k=1, gate_noise=0.5)
    assert getattr(good, name) in RANGES[name]
    for number in outside(RANGES[name]):
        with pytest.raises(ValueError, match=f"{name}={number}.* must be"):
            replace(good, **{name: number})


def test_every_number_among_the_layers_options_has_a_range():
    assert {f.name for f in fields(MoEConfig) if f.type in ("int", "float")} == set(RANGES)


@pytest.mark.parametrize(
    "option, value, objection",
    [
        ("--master-port", "65536", "65536 must be at least 1 and at most 65535"),
        ("--master-port", "1.5", "'1.5' is not a whole number"),
    ],
)
def test_the_launchers_options_keep_to_their_ranges(option, value, objection, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args([option, value, "--", "true"])
    assert f"argument {option}: {objection}" in capsys.readouterr().err
