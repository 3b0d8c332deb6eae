"""Ranges of numbers, options of what is chosen by name, and what refuses them."""

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
    option,
)
from fairseq_tutel.config.registry import Options, Registry
from fairseq_tutel.launch.cli import build_parser

RANGES = {f.name: f.metadata["range"] for f in fields(MoEConfig) if f.metadata["range"]}


def outside(allowed: Range) -> list[float]:
    """Numbers that are not in a range: beyond each end, and an open end itself."""
    ends = ((allowed.low, allowed.low_open, -1), (allowed.high, allowed.high_open, 1))
    found = [
        end + step * distance for end, is_open, step in ends for distance in (1, 0)[: 1 + is_open]
    ]
    return [number for number in found if math.isfinite(number)] + [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("allowed, text, inside", [
    (FINITE, "a finite number", [-1e6, 0, 1e6]),
    (FRACTION, "at least 0 and at most 1", [0, 0.5, 1]),
    (at_least(3), "at least 3", [3, 4, 1e6]),
    (Range(high=1), "at most 1", [-1e6, 0, 1]),
    (Range(0, 1, low_open=True, high_open=True), "above 0 and below 1", [1e-9, 1 - 1e-9]),
])  # fmt: skip
def test_a_range_holds_what_its_text_states(allowed, text, inside):
    assert str(allowed) == text
    assert not [number for number in outside(allowed) if number in allowed]
    assert all(number in allowed for number in inside)


def test_all_wrong_options_are_in_one_line():
    @dataclass
    class Given:
        noise: float = field(default=0.0, metadata={"range": at_least(0)})
        share: float = field(default=0.5, metadata={"range": FRACTION})
        depth: int | None = field(default=None, metadata={"range": at_least(1)})
        name: str = "no range"

    check_ranges(Given(), Given)
    check_ranges(SimpleNamespace(noise=1), Given)  # what is absent is not checked
    with pytest.raises(ValueError) as caught:
        check_ranges(Given(math.nan, 1.5, 0), Given)
    assert str(caught.value) == (
        "--noise nan must be a finite number; --share 1.5 must be at least 0 and at most 1; "
        "--depth 0 must be at least 1"
    )
    with pytest.raises(ValueError, match="^noise=-1 must be at least 0$"):
        check_ranges(Given(-1), Given, as_argument)


@pytest.mark.parametrize("name", RANGES)
def test_the_layers_options_keep_to_their_ranges(name):
    good = MoEConfig(num_experts=2, top_k=1, gate_noise=0.5)
    assert getattr(good, name) in RANGES[name]
    for number in outside(RANGES[name]):
        with pytest.raises(ValueError, match=f"{name}={number}.* must be"):
            replace(good, **{name: number})


def test_every_number_among_the_layers_options_has_a_range():
    assert {f.name for f in fields(MoEConfig) if f.type in ("int", "float")} == set(RANGES)


@pytest.mark.parametrize("value, objection", [
    ("65536", "65536 must be at least 1 and at most 65535"), ("1.5", "'1.5' is not a whole number"),
])  # fmt: skip
def test_the_launchers_options_keep_to_their_ranges(value, objection, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["--master-port", value, "--", "true"])
    assert f"argument --master-port: {objection}" in capsys.readouterr().err


class Plain:
    """Without options of its own.

    More lines.
    """

    Options = Options


class Tuned:
    """With some."""

    @dataclass(frozen=True)
    class Options(Options):
        """One of each kind."""

        count: int = option(3, "a number", at_least(1))
        rate: float = option(0.5, "a share", Range(0, 1, low_open=True))
        on: bool = option(False, "a switch")
        way: str = option("up", "a choice", choices=("up", "down"), flag="--moe-way")


@pytest.fixture
def registry():
    found = Registry("router")
    found.register("tuned")(Tuned)
    found.register("plain")(Plain)
    return found


def test_names_flags_and_options(registry):
    assert list(registry) == ["plain", "tuned"] and registry.get("tuned") is Tuned
    assert registry.summary("plain") == "Without options of its own"
    flags = ["moe_tuned_count", "moe_tuned_rate", "moe_tuned_on", "moe_way"]
    assert list(registry.flags()) == list(registry.flags("tuned")) == flags
    assert registry.options("tuned") == Tuned.Options()
    given = registry.options("tuned", {"rate": 1, "way": SimpleNamespace(value="down")})
    assert given == Tuned.Options(rate=1.0, way="down") and isinstance(given.rate, float)
    assert registry.options("tuned", given) is given
    config = MoEConfig(4, router="cosine", router_options={"proj_dim": 8})
    assert MoEConfig(4, router="cosine", router_options=config.router_options) == config


@pytest.mark.parametrize("name, given, message", [
    ("other", None, "router='other' is unknown; choose one of plain, tuned; one of your own is"),
    ("tuned", {"speed": 1}, "has no option 'speed'; it has count, rate, on, way"),
    ("plain", {"speed": 1}, "it has none"),
    ("plain", Tuned.Options(), "are no options of router='plain'"),
    ("tuned", 3, "3 are no options"),
    ("tuned", {"count": 0}, "router tuned: count=0 must be at least 1"),
    ("tuned", {"count": 1.5}, "count=1.5 must be a whole number"),
    ("tuned", {"count": True}, "count=True must be a whole number"),
    ("tuned", {"rate": 0}, "rate=0.0 must be above 0 and at most 1"),
    ("tuned", {"on": 1}, "on=1 must be of type bool"),
    ("tuned", {"way": "left"}, "way='left' is unknown; choose one of up, down"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(registry, name, given, message):
    with pytest.raises(ValueError, match=message):
        registry.options(name, given)


def test_options_from_a_command_line(registry):
    values = SimpleNamespace(**{k: f.default for k, f in registry.flags().items()})
    values.moe_way = "down"
    assert registry.options_of_flags("tuned", values) == Tuned.Options(way="down")
    with pytest.raises(ValueError, match="--moe-way down is an option of another router than pl"):
        registry.options_of_flags("plain", values)
    with pytest.raises(ValueError, match="'typo' is unknown"):
        registry.options_of_flags("typo", values)


def test_taken_names_and_flags_are_refused(registry):
    class Other:
        """Another class of the same name."""

        @dataclass(frozen=True)
        class Options(Options):
            """With a flag that there is already."""

            way: int = option(1, "", flag="--moe-way")

    with pytest.raises(ValueError, match="'plain' is registered already"):
        registry.register("plain")(Other)
    with pytest.raises(ValueError, match="'moe_way'.* options of 'tuned'"):
        registry.register("other")(Other)
    registry.register("plain")(Plain)  # a file that is imported twice
    assert list(registry) == ["plain", "tuned"]
