"""Read and check the arguments of :class:`~fairseq_tutel.moe.MoELayer` and of its calls."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..config import ExpertConfig, MoEConfig, with_preset
from ..distributed import ExpertParallelGroups, PassState, StepAgreement, StepSettings, build_groups
from .experts import OwnExperts, is_function
from .routers import Router

_KEPT = 64  # calls of one model with different options that alternate are fewer
# options of ExpertConfig that are read beside a user's own experts
_SHARED = {"shared_expert_dim", "shared_expert_gate"}
_SHARED_NETWORK = {"activation", "activation_dropout", "dropout"}


def by_config(
    options: Mapping[str, Any], others: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of routing and those of experts; raise TypeError for an unknown one.

    ``others``: names of the layer's other arguments, to correct a misspelt one.
    """
    if "optimizer" in options:
        raise TypeError(
            f"MoELayer takes no optimizer={options['optimizer']!r}: one optimizer steps the whole "
            "model. Write\n"
            "    optimizer = torch.optim.AdamW(model.parameters())  # after building the model\n"
            "    optimizer.step()  # after loss.backward()"
        )
    routing, experts = ({f.name for f in dataclasses.fields(c)} for c in (MoEConfig, ExpertConfig))
    experts.add("expert_fn")
    for name in options.keys() - routing - experts:
        close = difflib.get_close_matches(name, sorted({*routing, *experts, *others}), 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"MoELayer has no option {name}={options[name]!r}{hint}")
    of_routing = {name: value for name, value in options.items() if name in routing}
    return of_routing, {name: options[name] for name in options if name in experts}


def routing_config(
    config: MoEConfig | None,
    num_experts: int | None,
    options: Mapping[str, Any],
    preset: str | None = None,
) -> MoEConfig:
    """Return the options of routing, from ``config`` or from single options over a preset.

    Raise ValueError without a number of experts, and for options beside ``config``.
    """
    if config is None:
        if num_experts is None:
            raise ValueError("an MoE layer needs num_experts, or a config")
        if preset is not None:
            options = with_preset(preset, options, num_experts)
        return MoEConfig(num_experts=num_experts, **options)
    if preset is not None:
        options = {"preset": preset, **options}
    if num_experts not in (None, config.num_experts) or options:
        given = {"num_experts": num_experts, **options}
        raise ValueError(f"config holds all options of routing; given beside it: {given}")
    return config


def expert_config(
    experts: ExpertConfig | OwnExperts | None, options: dict[str, Any], hidden_dim: int | None
) -> tuple[ExpertConfig, OwnExperts | None]:
    """Return the options of the experts, and the user's modules or function that makes one.

    Raise ValueError for options that nothing reads, and for options beside a config.
    """
    function = options.pop("expert_fn", None)
    if function is not None and experts is not None:
        raise ValueError("expert_fn and experts both say what the experts are: give one")
    if function is not None and not is_function(function):
        raise ValueError(f"expert_fn must be a function that makes an expert, got {function!r}")
    if isinstance(experts, ExpertConfig):
        if options:
            raise ValueError(f"experts= holds all options of experts; given beside it: {options}")
        return experts, None
    own = function if experts is None else experts
    if own is not None:
        read = _SHARED | (_SHARED_NETWORK if options.get("shared_expert_dim") else set())
        given = {} if hidden_dim is None else {"hidden_dim": hidden_dim}
        given |= {name: value for name, value in options.items() if name not in read}
        if given:
            argument = "expert_fn" if experts is None else "experts"
            unread = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{argument}= says what the experts are, and not {unread}")
    return ExpertConfig(**options), own


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
