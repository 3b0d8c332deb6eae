"""Architectures with MoE layers: the table that command lines, errors and the planner read."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fairseq import models
from hydra.core.config_store import ConfigStore

from ..options.command_line import apply_rules
from ..options.fields import with_registered


@dataclass(frozen=True)
class Architecture:
    """Row of the table."""

    name: str  # of `--arch` and of `model._name`
    model: type
    config: type  # dataclass of the model's options
    # prefix of the model's names in checkpoints of Meta's branches, where the options alone turn a
    # dense architecture into one with experts
    replaces: str
    # ending of a name -> other defaults; each is an `--arch NAME_ending`
    sizes: Mapping[str, Mapping[str, Any]]

    @property
    def schema(self) -> type:
        """``config`` with the names and options of all that is registered now."""
        return with_registered(self.config)

    def register(self) -> None:
        """Make fairseq know the model, and its options if these have changed since."""
        schema = self.schema
        if self.name not in models.MODEL_REGISTRY:
            models.register_model(self.name, dataclass=schema)(self.model)
            rules = functools.partial(apply_rules, self)
            # register_model gives the model's own arch name an empty function
            models.ARCH_CONFIG_REGISTRY[self.name] = rules
            for ending, defaults in self.sizes.items():
                named = functools.partial(_set_sizes, defaults, rules)
                models.register_model_architecture(self.name, f"{self.name}_{ending}")(named)
        else:
            use_schema(self.name, self.model, schema)


def use_schema(name: str, model: Any, schema: Any) -> None:
    """Give a registered model another dataclass, unless it has this one."""
    if models.MODEL_DATACLASS_REGISTRY[name] is schema:
        return
    # the three places in which register_model keeps a dataclass
    setattr(model, "__dataclass", schema)
    models.MODEL_DATACLASS_REGISTRY[name] = schema
    node = schema()
    node._name = name
    ConfigStore.instance().store(name=name, group="model", node=node, provider="fairseq")


ARCHITECTURES: dict[str, Architecture] = {}


def moe_architecture(
    name: str, config: type, replaces: str, sizes: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[type], type]:
    """Return a decorator that adds a model class to the table; see :class:`Architecture`."""

    def add(model: type) -> type:
        ARCHITECTURES[name] = Architecture(name, model, config, replaces, sizes or {})
        return model

    return add


def _set_sizes(defaults: Mapping[str, Any], rules: Callable, args: Any) -> None:
    for key, value in defaults.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    if hasattr(args, "arch"):  # the command line's namespace, not a config from a checkpoint
        rules(args)


def name_with_experts(name: str | None) -> str | None:
    """Return the architecture for a checkpoint with MoE layers that states this name."""
    if name is None or name in ARCHITECTURES:
        return name
    if name.endswith("_moe") and name in models.ARCH_MODEL_REGISTRY:
        return name  # of any architecture
    rows = [row for row in ARCHITECTURES.values() if name.startswith(row.replaces)]
    return max(rows, key=lambda row: len(row.replaces)).name if rows else name
