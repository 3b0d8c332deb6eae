"""Names, options and flags of what is chosen by name."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import fairseq_tutel.moe  # noqa: F401  registers what is chosen by name
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.config.options import Range, at_least, option
from fairseq_tutel.config.registry import Options, Registry


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


def test_names_summaries_and_flags(registry):
    assert list(registry) == ["plain", "tuned"] and registry.get("tuned") is Tuned
    assert registry.summary("plain") == "Without options of its own"
    flags = ["moe_tuned_count", "moe_tuned_rate", "moe_tuned_on", "moe_way"]
    assert list(registry.flags()) == list(registry.flags("tuned")) == flags


def test_options_by_name_and_as_an_object(registry):
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
    ("tuned", {"rate": 0}, "rate=0.0 must be above 0 and at most 1"),  # ranges: test_ranges.py
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
