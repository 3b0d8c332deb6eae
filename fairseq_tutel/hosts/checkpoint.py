"""Checkpoints of a run on several ranks, whose experts any number of ranks takes up again.

A checkpoint ``X.pt`` is a set of files in the layout of fairseq's ``moe`` branch, ``X-shared.pt``
and ``X-rank-N.pt``, written as one thing (:mod:`fairseq_tutel.checkpoint`, whose command line
inspects, merges and reshards these sets too). Ranks share one file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..checkpoint import load_for_rank, set_exists, split_state, write_set
from ..checkpoint.layout import split_key
from ..distributed import (
    ExpertParallelGroups,
    full_tensor,
    gather_texts,
    is_sharded,
    process_world,
    shard_like,
)
from .model import expert_placement, moe_layers, unwrap
from .optimizer_state import StateNames
from .slices import join_experts

# torch's words for a tensor of another shape
_SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((.*?)\) from checkpoint, "
    r"the shape in current model is torch\.Size\((.*?)\)\.?"
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Write a set: weights, optimizer state and what else a run goes on from. Collective.

    Afterwards it is the new set, or an error on all ranks and what was there before. One rank
    writes one file.

    Args:
        path: X.pt; the directory is made.
        model: wrapped or not; all its MoE layers have one number of experts.
        optimizer: any torch optimizer over parameters of the model.
        extra: step, state of a scheduler or scaler, ...: numbers, texts, tensors and containers of
            them. ``load_checkpoint`` returns that of rank 0.

    Returns:
        The absolute path X.pt.

    Raises:
        ValueError: it cannot be saved; names what is in the way.
    """
    groups = expert_placement(model)
    model = unwrap(model)
    state: dict[str, Any] = {"model": _weights(model), "extra": dict(extra or {})}
    if optimizer is not None:
        names = StateNames.of_optimizer(optimizer, model)
        state["last_optimizer_state"] = names.to_named(optimizer.state_dict())
    return save_state(os.fspath(path), state, groups)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote on any number of ranks, in place. Collective.

    Also reads the weights of a merged file, and of sets that fairseq saved.

    Args:
        path: X.pt.
        model: of the same sizes, wrapped or not; on its device.
        optimizer: of the same kind, over the same parameters; None loads the weights alone.

    Returns:
        ``extra`` of rank 0.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged, does not fit, has no optimizer state, or some ranks do not see
            it.
    """
    path = os.fspath(path)
    groups = expert_placement(model)
    model = unwrap(model)
    if not checkpoint_exists(path):
        raise FileNotFoundError(f"{path}: no such checkpoint")
    state = load_state(path, groups, with_optimizer=optimizer is not None)
    check_num_experts(state, groups, path)
    with fitting(path):
        own = model.state_dict()
        weights = {
            key: shard_like(value, own[key]) if key in own else value
            for key, value in state.pop("model").items()
        }
        model.load_state_dict(weights, strict=True)
    if optimizer is not None:
        stored = state.get("last_optimizer_state")
        if stored is None:
            raise ValueError(f"{path} holds no optimizer state: load the weights alone")
        names = StateNames.of_optimizer(optimizer, model)
        optimizer.load_state_dict(names.from_named(stored, optimizer.state_dict()))
    return state.get("extra") or {}


def save_state(path: str, state: Mapping[str, Any], groups: ExpertParallelGroups) -> str:
    """Write one rank's state as its part of a set. Collective.

    Experts in slices become whole ones (:mod:`.slices`).

    Args:
        path: X.pt.
        state: ``model`` keyed by parameter names, experts numbered from 0;
            ``last_optimizer_state`` from :meth:`StateNames.to_named`; anything else is kept in
            every file. Dense entries are those of rank 0.
        groups: placement of the experts.

    Returns:
        The absolute path.
    """
    if groups.simulated:
        raise ValueError(f"not saving {path}: a simulated rank holds a part of the experts")
    rank, world_size = process_world()
    state = join_experts(state, groups, f"saving {path}")
    shared, mine = split_state(state)
    write_set(
        path,
        rank=rank,
        world_size=world_size,
        shared_state=shared if rank == 0 else None,
        rank_state=mine if rank < groups.ep_size else None,
        num_rank_files=groups.ep_size,
        gather_texts=gather_texts,
    )
    return os.path.abspath(path)


def load_state(
    path: str, groups: ExpertParallelGroups | None = None, *, with_optimizer: bool = True
) -> dict[str, Any]:
    """What :func:`save_state` would have been given by this rank, with whole experts. Collective.

    Args:
        path: X.pt.
        groups: placement of the model's experts; None: over all ranks, as if none had been chosen.

    Returns:
        See :func:`fairseq_tutel.checkpoint.load_for_rank`.
    """
    rank, world_size = process_world()
    size = 0
    if groups is not None and groups.ep_size != min(groups.num_experts, groups.world_size):
        size = groups.ep_size
    return load_for_rank(
        path,
        rank=rank,
        world_size=world_size,
        expert_parallel_size=size,
        with_optimizer=with_optimizer,
        gather_texts=gather_texts,
    )


def checkpoint_exists(path: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint exists, for all ranks or none. Collective.

    On disks of their own some ranks would start afresh while the others wait for them to load.

    Raises:
        ValueError: some ranks see it and others do not.
    """
    seen = gather_texts("seen" if set_exists(os.fspath(path)) else None)
    missing = [rank for rank, text in enumerate(seen) if text is None]
    if 0 < len(missing) < len(seen):
        raise ValueError(
            f"{path}: ranks {missing} of {len(seen)} do not see this checkpoint; all ranks must "
            "use one shared file system"
        )
    return not missing


def check_num_experts(
    state: Mapping[str, Any],
    groups: ExpertParallelGroups,
    path: str,
    otherwise: str = "build the model with num_experts={}",
) -> None:
    """Raises ValueError unless a loaded state has the experts of this model."""
    saved = (state.get("moe_checkpoint") or {}).get("num_experts")
    if saved not in (None, groups.num_experts):
        raise ValueError(
            f"{path} has {saved} experts in each MoE layer, this model has {groups.num_experts}: "
            f"{otherwise.format(saved)}"
        )


@contextmanager
def fitting(path: str) -> Iterator[None]:
    """Turn torch's error about weights that do not fit into a ValueError of one line."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit this model; check that the architectures match: "
            f"{_differences(str(error))}"
        ) from None


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with sharded tensors gathered, on rank 0 only.

    Raises:
        ValueError: a name would be taken for that of another parameter in a set.
    """
    prefixes = {f"{path}.experts." if path else "experts." for path in moe_layers(model)}
    rank, _ = process_world()
    weights = {}
    for key, value in model.state_dict().items():
        parsed = split_key(key)
        of_expert = any(key.startswith(prefix) for prefix in prefixes)
        taken_for_expert = parsed is not None
        if of_expert != taken_for_expert or (of_expert and parsed[0] not in prefixes):
            raise ValueError(
                f"{key}: in a checkpoint, 'experts.NUMBER.' in a name stands for an expert of an "
                "MoELayer and for nothing else; give the module another name"
            )
        sharded = is_sharded(value)
        value = full_tensor(value)
        if rank == 0 or not sharded:
            weights[key] = value
    return weights


def _differences(text: str, width: int = 160) -> str:
    """One line of torch's message, which may name every tensor of a model: the first of a kind."""
    rows = [" ".join(row.split()) for row in text.split("\n")]
    rows = rows[1:] or rows  # the first one names the class
    first = {row.partition(" for " if " for " in row else ":")[0]: row for row in reversed(rows)}
    shown = [
        _SIZES.sub(r"\1 is \2 in the checkpoint, \3 in the model", row)
        for row in rows
        if row in first.values()
    ]
    shown = [row if len(row) <= width else f"{row[:width]} ..." for row in shown]
    more = len(rows) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
