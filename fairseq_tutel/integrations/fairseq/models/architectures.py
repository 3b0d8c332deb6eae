"""The table of architectures with MoE layers: what the other rooms ask about a model.

A model is one file: its dataclass of options, its class, and a row of this table, which
:func:`moe_architecture` adds together with fairseq's own registration. Command lines, errors,
checkpoints of Meta's branches and the planner look here for names and options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model, register_model_architecture

from ..options.command_line import add_meta_flags, apply_rules
from ..options.fields import follow_registries


@dataclass(frozen=True)
class Architecture:
    """A row."""

    name: str  # of `--arch` and of `model._name`
    config: type  # dataclass of the model's options
    check: Callable[[Any], None]  # raises ValueError for options that the model cannot honour
    # beginning of the names that Meta's branches have for it in checkpoints; there the options
    # alone make a dense architecture one with experts
    replaces: str


ARCHITECTURES: dict[str, Architecture] = {}


def moe_architecture(row: Architecture, sizes: Mapping[str, Mapping[str, Any]] | None = None):
    """Decorator of a model class: register it with fairseq, and in the table.

    ``sizes``: ending of a name -> other defaults; each is an ``--arch NAME_ending`` of its own.
    """

    def register(model: type) -> type:
        own_flags = model.add_args

        def add_args(cls, parser):
            own_flags.__func__(cls, parser)
            add_meta_flags(parser)

        model.add_args = classmethod(add_args)
        model = register_model(row.name, dataclass=row.config)(model)
        rules = functools.partial(apply_rules, config=row.config, check=row.check)
        # register_model gives the model's own arch name an empty function
        ARCH_CONFIG_REGISTRY[row.name] = rules
        for ending, defaults in (sizes or {}).items():
            named = functools.partial(_set_sizes, defaults, rules)
            register_model_architecture(row.name, f"{row.name}_{ending}")(named)
        follow_registries(row.config, row.name)
        ARCHITECTURES[row.name] = row
        return model

    return register


def _set_sizes(defaults: Mapping[str, Any], rules: Callable, args: Any) -> None:
    for key, value in defaults.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    if hasattr(args, "arch"):  # the command line's namespace, not a config from a checkpoint
        rules(args)


def name_with_experts(name: str | None) -> str | None:
    """The architecture here of a checkpoint with MoE layers that names this one."""
    if name is None or name in ARCHITECTURES:
        return name
    rows = [row for row in ARCHITECTURES.values() if name.startswith(row.replaces)]
    return max(rows, key=lambda row: len(row.replaces)).name if rows else name
