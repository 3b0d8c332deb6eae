"""Options of the frozen configs as fairseq has them: flags, and fields of a Hydra schema.

:func:`schema_of` makes a dataclass, from which fairseq makes flags and a Hydra schema.
:func:`values_of` is the way back. A user dir may register routers, exchanges and networks of
experts after the models' dataclasses exist: :func:`with_registered` adds their names and options.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from ....config import PRESETS, ExchangeConfig, ExpertConfig, MoEConfig
from ....config.options import NO_FLAG, SAME, alias_name, as_flag, flag_name, with_flags
from ....moe import experts, routers  # noqa: F401  they register what the flags choose from

AUTO = "'auto': measured while training"
# frozen config -> group of its options in the help
CONFIGS = {ExchangeConfig: "communication", MoEConfig: "routing", ExpertConfig: "size"}


def _given(config: Any) -> list[dataclasses.Field]:
    """Return the fields with a default, which a command line can set: no sizes, no objects."""
    without = (None, dataclasses.MISSING)
    fields = [each for each in dataclasses.fields(config) if each.default not in without]
    return [each for each in fields if each.metadata["flag"] != NO_FLAG]


# (field, group of its option) of all frozen configs
_FIELDS = [
    (field, field.metadata["group"] or group)
    for config, group in CONFIGS.items()
    for field in _given(config)
]
# flag of an option that names an implementation -> where these are registered
REGISTERED = {
    flag: field.metadata["registry"]
    for field, _ in _FIELDS
    if field.metadata["registry"] is not None
    for flag in (flag_name(field), alias_name(field))
    if flag
}
# options that the tuner may choose: field of ExchangeConfig -> flag
TUNED = {field.name: flag_name(field) for field, _ in _FIELDS if field.metadata["or_auto"]}


def schema_of(config: Any) -> type:
    """Return a dataclass with the options of a frozen config and of its implementations."""
    mine = _given(config)
    fields = [entry for each in _FIELDS if each[0] in mine for entry in _entries(*each)]
    return dataclasses.make_dataclass(f"{config.__name__}Schema", fields)


def with_registered(config: type) -> type:
    """Return a model's dataclass, or a subclass with what was registered since it was made."""
    names = _registered_names()
    return config if names == _AT_IMPORT else _extended(config, names)


def _registered_names() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(registry) for registry in REGISTERED.values())


@functools.cache
def _extended(config: Any, names: tuple) -> type:
    """Return a subclass of ``config`` with the present choices; ``names`` is the cache's key."""
    chosen = [each for each in _FIELDS if each[0].metadata["registry"] is not None]
    fields = [entry for each in chosen for entry in _entries(*each)]
    stated = config.__dataclass_fields__
    for name, _, field in fields:
        if name in stated:
            field.default = stated[name].default  # a model may have another default
    return dataclasses.make_dataclass(config.__name__, fields, bases=(config,))


def use_present_names(args: Any) -> None:
    """Move values of former options (``moe_a2a``) to their present names; ValueError for two."""
    for field, _ in _FIELDS:
        flag, alias = flag_name(field), alias_name(field)
        former = getattr(args, alias, None) if alias else None
        if former is None:
            continue
        present = getattr(args, flag, None)
        if present is not None and str(present) not in (str(field.default), str(former)):
            both = f"{as_flag(flag, present)} and {as_flag(alias, former)}, its former name,"
            raise ValueError(f"{both} contradict each other: give the first")
        setattr(args, flag, str(former))
        setattr(args, alias, None)


def values_of(config: Any, args: Any) -> dict[str, Any]:
    """Return the arguments of a frozen config from a model's config or parsed arguments.

    Options that were not given and have no default on the command line are left out. ValueError for
    a text that is neither a number nor ``auto``, and for an implementation that was not chosen.
    """
    values = {}
    for field in _given(config):
        flag, meta = flag_name(field), field.metadata
        value = getattr(args, flag)
        if value is None:
            continue
        if meta["or_auto"]:
            value = _unless_auto(flag, str(value), field)
        values[field.name] = str(value) if isinstance(field.default, str) else value
        if meta["options"] is not None:
            values[meta["options"]] = meta["registry"].options_of_flags(values[field.name], args)
    return values


def _unless_auto(flag: str, text: str, field: dataclasses.Field) -> Any:
    """Return a number or name; the default for ``auto``, from which the tuner starts."""
    if text == "auto":
        return field.default
    if isinstance(field.default, str):
        return text
    choices = field.metadata["choices"]
    try:
        objection = field.metadata["range"].objection(int(text))
        if choices is not None and int(text) not in choices:
            objection = f"must be one of {', '.join(map(str, choices))}"
    except ValueError:
        objection = "must be a whole number"
    if objection:
        raise ValueError(f"{as_flag(flag, text)} {objection}, or auto")
    return int(text)


def _entries(field: dataclasses.Field, group: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, type, field) for an option, its former name and its implementations' options."""
    meta, flag = field.metadata, flag_name(field)
    registry = meta["registry"]
    default = field.default if meta["flag_default"] is SAME else meta["flag_default"]
    kind, allowed, choices = type(field.default), meta["range"], meta["choices"]
    text = with_flags(meta["help"] + meta["note"], *CONFIGS)
    if registry is not None:
        choices = tuple(registry)
        text += ": " + "; ".join(f"'{name}': {registry.summary(name)}" for name in registry)
    if meta["or_auto"]:
        text += f"{';' if registry else '.'} {AUTO}"
        # numbers are texts on the command line, next to "auto"
        choices = (*choices, "auto") if registry else None
        default, kind, allowed = str(default), str, None
    if (stated := PRESETS["meta"].get(field.name)) is not None:
        default = None  # not given: a preset decides
        others = "" if stated == field.default else f"; MoELayer's: {field.default}"
        others += f"; --moe-preset balanced: {PRESETS['balanced'][field.name]}"
        text += f" (default: {stated}{others})"
    elif default != field.default and not meta["note"] and not meta["or_auto"]:
        given = field.default if default is None else f"{default}; MoELayer's: {field.default}"
        text += f" (default: {given})"
    if choices is not None:
        kind = ChoiceEnum(choices)
    if default is None:
        kind = Optional[kind]
    alias = alias_name(field)
    if alias:
        text += f"; formerly --{alias.replace('_', '-')}"
    yield _entry(flag, kind, default, text, group=group, range=allowed)
    if alias:
        yield _entry(alias, Optional[str], None, f"former name of --{flag.replace('_', '-')}")
    if registry is not None:
        yield from _implementation_entries(flag, registry, group)


def _implementation_entries(flag: str, registry: Any, group: str) -> Iterator[tuple]:
    """Yield (name, type, field) for the options of each implementation that a flag can name."""
    for name in registry:
        for option_flag, option in registry.flags(name).items():
            choices = option.metadata["choices"]
            kind = type(option.default) if choices is None else ChoiceEnum(choices)
            text = f"--{flag.replace('_', '-')} {name}: {option.metadata['help']}"
            yield _entry(option_flag, kind, option.default, text, group=group)


def _entry(name: str, kind: Any, default: Any, help: str, **metadata: Any):
    return name, kind, dataclasses.field(default=default, metadata={"help": help, **metadata})


_AT_IMPORT = _registered_names()
