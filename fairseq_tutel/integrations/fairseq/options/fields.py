"""Options of the frozen configs as fairseq has them: flags, and fields of a Hydra schema.

An option is described once, by the field of its config (:mod:`fairseq_tutel.config.options`). From
that come a dataclass that fairseq makes flags and a schema of (:func:`schema_of`), and the way back
from a model's config, or parsed arguments, to those of the frozen config (:func:`values_of`).

Routers, exchanges and networks of experts may be registered at any time
(:func:`follow_registries`): when a user dir adds one, the model's dataclass exists already, and is
given the new fields in place, since fairseq and others hold on to the class.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
import dataclasses
from collections.abc import Iterator
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from hydra.core.config_store import ConfigStore

from ....config import EXCHANGES, EXPERTS, ROUTERS, ExchangeConfig, MoEConfig
from ....config.options import SAME, as_flag, flag_name, with_flags

AUTO = "'auto': tried and measured while training"
# options that choose what is registered
REGISTERED = {"moe_router": ROUTERS, "moe_a2a": EXCHANGES, "moe_expert_network": EXPERTS}


def schema_of(config: type, group: str) -> type:
    """A dataclass with a field for each option of a frozen config that a command line can give.

    Options without a default of their own are left out: sizes, which models state, and objects.
    ``group``: of the help, for options that do not say theirs.
    """
    fields = [_flag(field, group) for field in _given(config)]
    return dataclasses.make_dataclass(f"{config.__name__}Schema", fields)


def values_of(config: type, args: Any) -> dict[str, Any]:
    """Arguments of a frozen config from a model's config, or a namespace of parsed arguments.

    Options that were not given and have no default on the command line are left out. Raises
    ValueError for a text that is neither a number nor ``auto`` where one of the two is needed.
    """
    values = {}
    for field in _given(config):
        flag = flag_name(field)
        value = getattr(args, flag)
        if value is None:
            continue
        if field.metadata["or_auto"]:
            value = _unless_auto(flag, str(value), field)
        values[field.name] = str(value) if isinstance(field.default, str) else value
    return values


def _given(config: type) -> list[dataclasses.Field]:
    without = (None, dataclasses.MISSING)
    return [field for field in dataclasses.fields(config) if field.default not in without]


def _flag(field: dataclasses.Field, group: str):
    meta = field.metadata
    default = field.default if meta["flag_default"] is SAME else meta["flag_default"]
    kind = type(field.default)
    if meta["choices"] is not None and not meta["or_auto"]:
        kind = ChoiceEnum(meta["choices"])
    elif default is None:
        kind = Optional[kind]
    about = with_flags(meta["help"], MoEConfig, ExchangeConfig)
    text = about + with_flags(meta["note"], MoEConfig, ExchangeConfig)
    if default != field.default and not meta["note"]:
        given = field.default if default is None else f"{default}; MoELayer's: {field.default}"
        text += f" (default: {given})"
    allowed = meta["range"]
    if meta["or_auto"]:
        kind, default, allowed, text = str, str(default), None, f"{text}. {AUTO}"
    more = {"group": meta["group"] or group, "or_auto": meta["or_auto"], "about": about}
    return _field(flag_name(field), kind, default, text, range=allowed, **more)


def _unless_auto(flag: str, text: str, field: dataclasses.Field) -> Any:
    """A number or name, or the default where the tuner chooses it: there it begins."""
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


def follow_registries(config: type, model: str) -> None:
    """Keep the dataclass of a model, which has a field for each of ``REGISTERED``, up to date with
    what is registered, now and later; ``model`` is its name in fairseq's Hydra store.
    """

    def update():
        _extend(config, list(_registered_fields(config)))
        node = config()
        node._name = model
        ConfigStore.instance().store(name=model, group="model", node=node, provider="fairseq")

    for registry in REGISTERED.values():
        registry.on_change(update)


def _registered_fields(config: type) -> Iterator:
    for name, registry in REGISTERED.items():
        stated = config.__dataclass_fields__[name]
        about = stated.metadata.get("about", stated.metadata["help"])
        group, or_auto = stated.metadata["group"], stated.metadata["or_auto"]
        summaries = [f"'{each}': {registry.summary(each)}" for each in registry]
        kinds = ChoiceEnum([*registry, *["auto"] * or_auto])
        text = f"{about}: {'; '.join([*summaries, *[AUTO] * or_auto])}"
        more = {"group": group, "or_auto": or_auto, "about": about}
        yield _field(name, kinds, stated.default, text, **more)
        if registry is EXCHANGES:
            continue  # an exchange's options are those of ExchangeConfig
        for chosen in registry:
            for flag, option in registry.flags(chosen).items():
                choices = option.metadata["choices"]
                kind = type(option.default) if choices is None else ChoiceEnum(choices)
                text = f"--{name.replace('_', '-')} {chosen}: {option.metadata['help']}"
                yield _field(flag, kind, option.default, text, group=group)


def _field(name: str, kind: type, default: Any, help_text: str, **metadata):
    return name, kind, dataclasses.field(default=default, metadata={"help": help_text, **metadata})


def _extend(config: type, fields: list) -> None:
    """Give a dataclass more fields: those of a subclass that has them."""
    extended = dataclasses.make_dataclass(config.__name__, fields, bases=(config,))
    for name, kind, field in fields:
        config.__annotations__[name] = kind
        setattr(config, name, field.default)
    for made in ("__init__", "__repr__", "__eq__", "__dataclass_fields__"):
        setattr(config, made, getattr(extended, made))
