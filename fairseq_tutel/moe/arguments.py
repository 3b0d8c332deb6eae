"""What the arguments of :class:`~fairseq_tutel.moe.MoELayer` mean; each function refuses others."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config import MoEConfig
from ..distributed import ExpertParallelGroups, build_groups
from .routers import Router, make_router


def one_config(
    config: MoEConfig | None,
    num_experts: int | None,
    routing: Mapping[str, Any],
    others: Iterable[str],
) -> MoEConfig:
    """The options of routing; ``others`` are names of arguments, to find a misspelt one."""
    options = [field.name for field in dataclasses.fields(MoEConfig)]
    for name in routing.keys() - set(options):
        close = difflib.get_close_matches(name, [*options, *others], 1, cutoff=0.5)
        raise TypeError(
            f"MoELayer has no option {name}={routing[name]!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    if config is None:
        if num_experts is None:
            raise ValueError("an MoE layer needs num_experts, or a config")
        return MoEConfig(num_experts=num_experts, **routing)
    if num_experts not in (None, config.num_experts) or routing:
        given = {"num_experts": num_experts, **routing}
        raise ValueError(f"config holds all options of routing; given beside it: {given}")
    return config


def groups_for(num_experts: int, groups: ExpertParallelGroups | None) -> ExpertParallelGroups:
    """The placement of the experts; without one over all ranks, which is a collective call."""
    groups = groups if groups is not None else build_groups(num_experts)
    if groups.num_experts != num_experts:
        raise ValueError(
            f"groups were built for {groups.num_experts} experts, the layer has {num_experts}"
        )
    return groups


def gate_for(gate: nn.Module | None, model_dim: int, config: MoEConfig) -> nn.Module:
    """The gate that was given, or the router that the options name."""
    if gate is None:
        return make_router(model_dim, config)
    if not isinstance(gate, nn.Module):
        raise ValueError(f"gate must be a module, got {gate!r}; router='cosine' chooses a gate")
    if config.load_bias != "none" and not isinstance(gate, Router):
        raise ValueError(
            f"load_bias={config.load_bias!r} needs a router; a plain module as gate has no load "
            "bias"
        )
    return gate


def own_experts(
    experts: Sequence[nn.Module] | None,
    expert_fn: Callable[[], nn.Module] | None,
    groups: ExpertParallelGroups,
    seed: int | None,
    built_in: Mapping[str, Any],
) -> Sequence[nn.Module] | None:
    """This rank's experts where they are the user's own; None: built-in ones, of which
    ``built_in`` has what was given, by name.
    """
    if experts is None and expert_fn is None:
        return None
    if experts is not None and expert_fn is not None:
        raise ValueError("expert_fn and experts both say what the experts are: give one")
    unread = [f"{name}={value!r}" for name, value in built_in.items() if value is not None]
    if unread:
        name = "expert_fn" if experts is None else "experts"
        raise ValueError(f"{name}= says what the experts are, and not {' and '.join(unread)}")
    return _make_each(expert_fn, groups, seed) if experts is None else experts


def _make_each(expert_fn, groups, seed):
    """An expert of each call. What it draws depends on ``seed`` and the expert's global index only:
    ranks that hold an expert begin alike, and experts differ however ranks were seeded."""
    if not callable(expert_fn) or isinstance(expert_fn, nn.Module):
        raise ValueError(f"expert_fn must be a function that makes an expert, got {expert_fn!r}")
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    experts = []
    with torch.random.fork_rng(devices):
        for index in groups.local_experts:
            torch.manual_seed(seed + index)
            experts.append(expert_fn())
    if not all(isinstance(expert, nn.Module) for expert in experts):
        raise ValueError(f"expert_fn must make modules, but made {experts[0]!r}")
    if len(set(map(id, experts))) < len(experts):
        raise ValueError("expert_fn made the same module twice: each expert has its own weights")
    return experts
