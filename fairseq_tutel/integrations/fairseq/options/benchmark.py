"""``--moe-benchmark KEY=VALUE,...``: switches for measurements, and their former flags."""

# no postponed annotations here: fairseq reads the types of dataclass fields
import dataclasses
from dataclasses import dataclass
from typing import Any

from ....config.options import as_flag, at_least, check_options, check_ranges, option
from .bundles import pairs, typed


@dataclass(frozen=True)
class Benchmark:
    """Switches of a run that measures speed; ``MoELayer`` and ``build_groups`` have them, too."""

    force_load: str = option(
        "",
        "shares of the load in place of the gate's choices, with which training is worthless "
        "(`1`: even; `3,1`: every first expert has three times the pairs of every second)",
    )
    simulate_world_size: int = option(
        0,
        "compute one rank of this many in one process, with local copies for all-to-alls",
        at_least(0),
    )
    skip_exchange: bool = option(False, "if true, leave out the all-to-alls; the results are wrong")
    record_exchange_time: bool = option(
        False, "if true, log the time of the forward all-to-alls (slow)"
    )

    def __post_init__(self):
        check_options(self)


KEYS = {field.name: field for field in dataclasses.fields(Benchmark)}
HELP = "KEY=VALUE,... for measurements. " + ". ".join(
    f"`{key}`: {field.metadata['help']}" for key, field in KEYS.items()
)
# key -> flag before; the last two are of Meta's branches
_FORMER = {
    "force_load": "moe_force_load",
    "simulate_world_size": "moe_simulate_world_size",
    "skip_exchange": "dummy_a2a",
    "record_exchange_time": "record_a2a_perf_stats",
}
ALONE = "true"  # the flag without a value, which --moe-force-load needed


def _former(key: str) -> tuple[str, Any, Any]:
    field = KEYS[key]
    text = f"former name of --moe-benchmark {key}"
    return _FORMER[key], field.type, option(field.default, text, field.metadata["range"])


# base of the dataclass of a model's options
FormerFlags = dataclasses.make_dataclass("FormerFlags", map(_former, KEYS))


def benchmark_of(args: Any) -> Benchmark:
    """Read ``--moe-benchmark`` and its former flags; raise ValueError if they are not valid."""
    check_ranges(args, FormerFlags)
    text = str(getattr(args, "moe_benchmark", None) or "")
    is_on = text.lower() not in ("", "false", "none")
    given: dict[str, Any] = {}
    if is_on and text.lower() != ALONE:
        found = pairs("moe_benchmark", text, KEYS)
        given = {key: typed(KEYS[key], word, written) for key, word, written in found}
    for key, flag in _FORMER.items():
        former = getattr(args, flag, None)
        if former and given.setdefault(key, former) != former:
            present, other = f"--moe-benchmark {key}={given[key]}", as_flag(flag, former)
            raise ValueError(
                f"{present} and {other}, its former name, contradict each other: give the first"
            )
    if not is_on and "force_load" in given:
        load = given["force_load"]
        raise ValueError(
            f"--moe-force-load {load} only measures speed: give --moe-benchmark force_load={load}"
        )
    return Benchmark(**given)
