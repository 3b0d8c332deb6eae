"""``--moe-router-options KEY=VALUE,...``: options that few trainings need, behind one flag each.

A key is the name of an option without its prefix. That option's own flag is still accepted, but has
no row in the table of options. :func:`expand` moves the values to the options themselves, so that
nothing else knows of bundles.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ....config.options import as_flag
from .fields import REGISTERED


@dataclass(frozen=True)
class Bundle:
    """Options of one topic: those in ``names``, and those of the implementations of ``chooser``."""

    about: str
    names: tuple[str, ...] = ()
    chooser: str | None = None  # option that names an implementation in a registry


BUNDLES = {
    "moe_router_options": Bundle(
        "of the router",
        (
            *("moe_gate_noise", "moe_input_jitter", "moe_input_dropout", "moe_score_function"),
            *("moe_num_expert_groups", "moe_top_groups", "moe_group_score", "moe_route_scale"),
            *("moe_unnormalized_weights", "moe_normalize_gate_prob_before_dropping"),
            *("moe_drop_policy", "moe_eom", "moe_fom", "moe_local_drop", "moe_null_experts"),
        ),
        "moe_router",
    ),
    "moe_gate_loss_options": Bundle(
        "of the balance loss",
        (
            "moe_gate_loss_scope",
            "moe_gate_loss_choices",
            "moe_gate_loss_over",
            "moe_load_importance_loss",
        ),
    ),
    "moe_expert_network_options": Bundle(
        "of the network of the experts", chooser="moe_expert_network"
    ),
    "moe_wire_options": Bundle(
        "of --moe-wire", ("moe_wire_back", "moe_wire_grad", "moe_wire_compact")
    ),
    "moe_balance_options": Bundle(
        "of --moe-balance-ranks", ("moe_balance_tolerance", "moe_balance_min_rows")
    ),
    "moe_tune_options": Bundle(
        "of the trials of 'auto'", ("moe_tune_steps", "moe_tune_max_loss", "moe_tune_file")
    ),
}


def keys_of(bundle: str) -> dict[str, str]:
    """Return key -> name of the option, of all that is registered now."""
    chooser = BUNDLES[bundle].chooser
    theirs = REGISTERED[chooser].flags() if chooser else ()
    stem = bundle.removesuffix("options")
    names = (*BUNDLES[bundle].names, *theirs)
    return {name.removeprefix(stem).removeprefix("moe_"): name for name in names}


def members() -> set[str]:
    """Return the names of the options that stand in a bundle."""
    return {name for bundle in BUNDLES for name in keys_of(bundle).values()}


def expand(args: Any, config: type) -> None:
    """Move the values of bundles in ``args`` to their options; ``config`` has the types.

    ValueError for a key or value that is unknown, and for an option that has another value already.
    """
    known = {field.name: field for field in dataclasses.fields(config)}
    for bundle in BUNDLES:
        text = getattr(args, bundle, None)
        keys = keys_of(bundle)
        for key, word, written in pairs(bundle, text, keys) if text else ():
            name = keys[key]
            field = known.get(name) or REGISTERED[BUNDLES[bundle].chooser].flags()[name]
            value = typed(field, word, written)
            present = getattr(args, name, field.default)
            if str(present) not in (str(field.default), str(value)):
                both = f"{written} and {as_flag(name, present)}"
                raise ValueError(f"{both} contradict each other: give one of them")
            setattr(args, name, value)
        if text:
            setattr(args, bundle, None)


def pairs(option: str, text: str, keys: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, the option with this pair alone) of KEY=VALUE,...; values may have commas.

    ValueError for a word that is no pair, or has another key.
    """
    for word in re.split(r",(?=[^,]*=)", text):
        key, equals, value = word.partition("=")
        key, written = key.strip().replace("-", "_"), as_flag(option, word)
        if not equals or key not in keys:
            raise ValueError(f"{written}: give KEY=VALUE of {', '.join(keys)}")
        yield key, value.strip(), written


def typed(field: dataclasses.Field, word: str, written: str) -> Any:
    """Return the value of an option from its text; ValueError, which names ``written``."""
    choices = field.metadata.get("choices") or [
        choice.value for choice in getattr(field.type, "__members__", {}).values()
    ]
    kind = str if field.default is None else type(field.default)
    try:
        value = {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{written}: {word!r} is not {wanted}") from None
    if choices and value not in choices:
        raise ValueError(f"{written}: choose one of {', '.join(map(str, choices))}")
    return value
