"""Read and check the arguments of :class:`~fairseq_tutel.moe.MoELayer` and of its calls."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..config import MoEConfig
from ..distributed import ExpertParallelGroups, PassState, StepAgreement, StepSettings, build_groups
from .routers import Router

_KEPT = 64  # calls of one model with different options that alternate are fewer


def routing_config(
    config: MoEConfig | None,
    num_experts: int | None,
    routing: Mapping[str, Any],
    others: Iterable[str],
) -> MoEConfig:
    """Return the routing options, from ``config`` or from single options.

    ``others``: names of the layer's other arguments, to correct a misspelt one. Raise TypeError for
    an unknown option, ValueError without a number of experts or for options beside ``config``.
    """
    options = [field.name for field in dataclasses.fields(MoEConfig)]
    if "optimizer" in routing:
        raise TypeError(
            f"MoELayer takes no optimizer={routing['optimizer']!r}: one optimizer steps the whole "
            "model. Write\n"
            "    optimizer = torch.optim.AdamW(model.parameters())  # after building the model\n"
            "    optimizer.step()  # after loss.backward()"
        )
    for name in routing.keys() - set(options):
        close = difflib.get_close_matches(name, [*options, *others], 1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"MoELayer has no option {name}={routing[name]!r}{hint}")
    if config is None:
        if num_experts is None:
            raise ValueError("an MoE layer needs num_experts, or a config")
        return MoEConfig(num_experts=num_experts, **routing)
    if num_experts not in (None, config.num_experts) or routing:
        given = {"num_experts": num_experts, **routing}
        raise ValueError(f"config holds all options of routing; given beside it: {given}")
    return config


def groups_for(num_experts: int, groups: ExpertParallelGroups | None) -> ExpertParallelGroups:
    """Return the placement of the experts; build it if None, which is collective."""
    if groups is None:
        return build_groups(num_experts)
    if groups.num_experts != num_experts:
        raise ValueError(
            f"groups were built for {groups.num_experts} experts, the layer has {num_experts}"
        )
    return groups


def own_gate(gate: nn.Module, config: MoEConfig) -> nn.Module:
    """Return the user's gate; raise ValueError for no module, or for a load bias it cannot have."""
    if not isinstance(gate, nn.Module):
        raise ValueError(f"gate must be a module, got {gate!r}; router='cosine' chooses a gate")
    if config.load_bias != "none" and not isinstance(gate, Router):
        raise ValueError(f"load_bias={config.load_bias!r} needs a router as gate, not a module")
    return gate


def refuse_network_options(argument: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError for options of built-in experts; ``given``: value and default by name."""
    unread = [f"{name}={value!r}" for name, (value, default) in given.items() if value != default]
    if unread:
        raise ValueError(f"{argument}= says what the experts are, and not {' and '.join(unread)}")


def refuse_local_drop_of_slices(config: MoEConfig, groups: ExpertParallelGroups) -> None:
    """Raise ValueError for ``local_drop`` if ranks have slices of experts."""
    if config.local_drop and groups.num_slices > 1:
        raise ValueError(
            f"local_drop={config.local_drop} needs whole experts, not {groups.placement!r} ones"
        )


class CallConfigs:
    """Routing options of calls with another ``top_k`` or ``capacity_factor`` than the layer's.

    The newest :data:`_KEPT` are kept, because checking options is slow.
    """

    def __init__(self):
        self._changed: dict[tuple, tuple[MoEConfig, MoEConfig]] = {}  # before, after

    def of_call(
        self, config: MoEConfig, top_k: int | None, capacity_factor: float | None, training: bool
    ) -> MoEConfig:
        """Return ``config`` with the options of a call; None: the layer's."""
        asked = (top_k, capacity_factor, training)
        before, after = self._changed.get(asked, (None, None))
        if after is None or before is not config:
            changes: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
            if capacity_factor is not None and training:
                changes["capacity_factor"] = capacity_factor
            elif capacity_factor is not None:
                changes["eval_capacity_factor"] = capacity_factor
                changes["eval_capacity_token_fraction"] = 0.0  # takes precedence over the factor
            after = dataclasses.replace(config, **changes)
            self._changed[asked] = config, after
            if len(self._changed) > _KEPT:  # under a schedule each step asks for other options
                del self._changed[next(iter(self._changed))]
        return after


def check_agreement(
    step: StepAgreement, settings: Callable[[torch.dtype, PassState], StepSettings]
) -> None:
    """Raise ValueError for settings that the ranks did not compare: sizes would not fit.

    The dtype may differ: the agreement may be older than the autocast that decides it. The state
    may differ, because an agreement may hold for several layers.
    """
    if step.settings is None:
        return
    wanted = settings(step.settings.dtype, step.settings.state)
    for label, (value, agreed) in wanted.differences(step.settings).items():
        raise ValueError(
            f"this call's options make {label} {value}, but the ranks' agreement for this step has "
            f"{agreed}; give the same options to step_settings()"
        )
