"""Options that registries decide: ``--moe-router``, the routers' own options, and ``--moe-a2a``.

Routers and exchanges may be registered at any time before a command line is parsed, as by a user's
own user dir, when the model's dataclass exists already. It is then given the new fields in place,
since fairseq and others hold on to the class.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
import dataclasses
from typing import Any

from fairseq.dataclass import ChoiceEnum
from hydra.core.config_store import ConfigStore

from ..config import EXCHANGES, ROUTERS
from ..registry import Registry


def follow_registries(config: type, model: str) -> None:
    """Keep the dataclass of a model up to date with what is registered, now and later.

    Args:
        config: has the fields ``moe_router`` and ``moe_a2a``; changed in place.
        model: name under which fairseq's Hydra store has the dataclass.
    """

    def update():
        _extend(
            config,
            [*_router_fields(), _choice("moe_a2a", EXCHANGES, "how tokens travel between ranks")],
        )
        node = config()
        node._name = model
        ConfigStore.instance().store(name=model, group="model", node=node, provider="fairseq")

    ROUTERS.on_change(update)
    EXCHANGES.on_change(update)


def _router_fields() -> list:
    fields = [_choice("moe_router", ROUTERS, "the gate")]
    for router in ROUTERS:
        for flag, option in ROUTERS.flags(router).items():
            choices = option.metadata["choices"]
            kind = type(option.default) if choices is None else ChoiceEnum(choices)
            text = f"--moe-router {router}: {option.metadata['help']}"
            fields.append(_field(flag, kind, option.default, text))
    return fields


def _choice(name: str, registry: Registry, what: str):
    summaries = "; ".join(f"'{each}': {registry.summary(each)}" for each in registry)
    return _field(name, ChoiceEnum(list(registry)), "linear", f"{what}: {summaries}")


def _field(name: str, kind: type, default: Any, help_text: str):
    return name, kind, dataclasses.field(default=default, metadata={"help": help_text})


def _extend(config: type, fields: list) -> None:
    """Give a dataclass more fields: those of a subclass that has them."""
    extended = dataclasses.make_dataclass(config.__name__, fields, bases=(config,))
    for name, kind, field in fields:
        config.__annotations__[name] = kind
        setattr(config, name, field.default)
    for made in ("__init__", "__repr__", "__eq__", "__dataclass_fields__"):
        setattr(config, made, getattr(extended, made))
