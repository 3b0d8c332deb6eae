"""Content of a checkpoint, and the split of a rank's state into the shared and its own file.

A state is fairseq's dict, with ``moe_checkpoint`` (:class:`SetMetadata`), and ``moe_growth`` if
experts were added or removed (:mod:`.growth`).

``model`` is keyed by Meta's parameter names, one entry per expert. So is the optimizer's state:

    last_optimizer_state = {
        "named_state": {parameter name: {state name: tensor or scalar}},
        "param_groups": [{hyper-parameter: value}],  # no "params": names replace them
        "loss_scale": float or None,
    }

A rank file holds the named state of its experts, the shared file all else. Every expert has its
own complete state, step count included, so that it moves to other ranks unchanged.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from .layout import CheckpointError, split_dense_expert

FORMAT_VERSION = 1
METADATA = "moe_checkpoint"
MODEL = "model"
OPTIMIZER = "last_optimizer_state"
NAMED_STATE = "named_state"
GROWTH = "moe_growth"
# one-element buffers that fairseq's models save beside their parameters, such as a version
_MARKS = {"version", "_float_tensor"}
# options of the model that are numbers, and that the commands read
_COUNTS = ("moe_null_experts", "moe_top_k", "moe_lora_rank")
_OF_FAIRSEQ = ("args", "cfg", "criterion", "optimizer_history", "task_state", "extra_state")


@dataclass(frozen=True)
class SetMetadata:
    """Metadata in each file of a set, to distinguish a member from a stale or foreign file."""

    save_id: str  # random, the same in all files of one save
    world_size: int  # ranks of the run that saved it
    num_rank_files: int  # 0 in a merged file
    num_experts: int
    rank: int | None = None  # of a rank file
    format_version: int = FORMAT_VERSION

    @classmethod
    def of_state(cls, state: Mapping[str, Any], where: str) -> SetMetadata | None:
        """Return a file's metadata, None if another program wrote it; raise if it is damaged."""
        stored = state.get(METADATA)
        if stored is None:
            return None
        kinds = {field.name: (int,) for field in fields(cls)}
        kinds |= {"save_id": (str,), "rank": (int, type(None))}
        if not isinstance(stored, dict) or any(
            name not in stored or type(stored[name]) not in kind for name, kind in kinds.items()
        ):
            raise CheckpointError(f"{where}: incomplete {METADATA!r} metadata: {stored!r}")
        if stored["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{where}: written in checkpoint format {stored['format_version']}, but this "
                f"version of fairseq_tutel reads up to {FORMAT_VERSION}; upgrade it"
            )
        return cls(**{name: stored[name] for name in kinds})


def optimizer_is_named(optimizer: Any) -> bool:
    """Return whether an optimizer state is keyed by parameter name."""
    return isinstance(optimizer, dict) and isinstance(optimizer.get(NAMED_STATE), dict)


def check_file(state: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if a file's entries are not of the kinds that readers rely on."""
    history, extra = state.get("optimizer_history"), state.get("extra_state")
    optimizer = state.get(OPTIMIZER) if optimizer_is_named(state.get(OPTIMIZER)) else {}
    position = extra.get("train_iterator") if isinstance(extra, dict) else None
    for what, fits in (
        (MODEL, isinstance(state.get(MODEL), dict)),
        ("optimizer_history", _are_dicts(history)),
        (GROWTH, _are_dicts(state.get(GROWTH))),
        ("extra_state", extra is None or isinstance(extra, dict)),
        ("train_iterator", position is None or isinstance(position, dict)),
        ("param_groups", _are_dicts(optimizer.get("param_groups"))),
        *_kinds_of_options(state),
    ):
        if not fits:
            raise CheckpointError(f"{where}: not a fairseq checkpoint: has no proper {what!r}")
    for entry in history or ():
        for name, kind in (("num_updates", int), ("criterion_name", str)):
            if not isinstance(entry.get(name), kind | None):
                raise CheckpointError(f"{where}: {name} {entry[name]!r} is no {kind.__name__}")
    for key, value in state[MODEL].items():
        if not isinstance(key, str) or not (_is_plain(value) or key.endswith("_extra_state")):
            raise CheckpointError(f"{where}: has {_kind(value)} for {key!r}, not a dense tensor")
    for key, entries in optimizer.get(NAMED_STATE, {}).items():
        if not isinstance(key, str) or not isinstance(entries, dict):
            raise CheckpointError(f"{where}: has {_kind(entries)} for the state of {key!r}")
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and not _is_plain(value):
                raise CheckpointError(f"{where}: has {_kind(value)} for {name!r} of {key!r}")


def _kinds_of_options(state: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the places of options that this package reads, and whether their kinds are right."""
    stored = {"args": state.get("args"), "cfg": state.get("cfg")}
    if isinstance(stored["cfg"], Mapping):
        sections = ("model", "task", "criterion", "distributed_training")
        stored |= {name: stored["cfg"].get(name) for name in sections}
    for name, options in stored.items():
        yield name, options is None or isinstance(options, Mapping | Namespace)
    model = options_of(state)
    world_size = options_of(state, "distributed_training").get("distributed_world_size")
    counts = {name: model.get(name) for name in _COUNTS} | {"distributed_world_size": world_size}
    for name, count in counts.items():
        yield name, count is None or isinstance(count, int) and count >= 0


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with elements in memory, neither sparse nor quantized."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_quantized and not value.is_meta


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.device.type} tensor of {value.dtype} with layout {value.layout}"


def _are_dicts(value: Any) -> bool:
    return value is None or isinstance(value, list) and all(isinstance(v, dict) for v in value)


def check_complete(state: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if entries are missing that fairseq needs to resume or evaluate."""
    missing = [key for key in ("optimizer_history", "extra_state") if not state.get(key)]
    if not missing and "train_iterator" not in state["extra_state"]:
        missing.append("train_iterator")
    if state.get("cfg") is None and state.get("args") is None:
        missing.append("cfg")
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(f"{where}: lacks {names}, which fairseq needs; use another set")


def options_of(state: Mapping[str, Any], section: str = "model") -> Mapping[str, Any]:
    """Return a section of the stored options; all of them if they are stored as ``args``."""
    config = state.get("cfg")
    options = config.get(section) if isinstance(config, Mapping) else state.get("args")
    if not isinstance(options, Mapping):
        options = getattr(options, "__dict__", {})  # a Namespace
    return options


def with_options(
    state: Mapping[str, Any], changes: Mapping[str, Any], section: str = "model"
) -> dict[str, Any]:
    """Return a state with changed options in a section, if it has options; None removes one."""
    config = state.get("cfg")
    stored = config.get(section) if isinstance(config, Mapping) else state.get("args")
    if stored is None:
        return dict(state)
    changed = {**options_of(state, section), **changes}
    kept = {name: value for name, value in changed.items() if changes.get(name, 0) is not None}
    options = kept if isinstance(stored, Mapping) else type(stored)(**kept)
    if isinstance(config, Mapping):
        return {**state, "cfg": {**config, section: options}}
    return {**state, "args": options}


def null_experts(state: Mapping[str, Any]) -> int:
    """Return N, the number of null experts (gate outputs without an expert), from the options."""
    return int(options_of(state).get("moe_null_experts") or 0)


def updates_done(state: Mapping[str, Any]) -> int:
    """Return the number of updates of the run that saved a set; 0 if unknown."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates") or 0)


def growth_of(state: Mapping[str, Any]) -> list[str]:
    """Return a line per change of the number of experts; 0 experts are a dense model."""
    lines = []
    for entry in state.get(GROWTH) or ():
        try:
            sizes = f"{entry['before'] or 'dense'} -> {entry['after'] or 'dense'}"
            lines.append("{} ({what} after {update} updates: {how})".format(sizes, **entry))
        except (KeyError, TypeError):
            raise CheckpointError(f"{GROWTH!r} has an invalid entry: {entry!r}") from None
    return lines


def is_of_fairseq(state: Mapping[str, Any]) -> bool:
    """Return whether a state has entries that only fairseq stores."""
    return any(key in state for key in _OF_FAIRSEQ)


def parameters(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that the trainer counts: tied weights once, no version marks."""
    distinct: dict[tuple, tuple[str, torch.Tensor]] = {}
    for key, tensor in model.items():
        if isinstance(tensor, torch.Tensor) and key.rpartition(".")[2] not in _MARKS:
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
            distinct.setdefault(identity if tensor.numel() else (key,), (key, tensor))
    return dict(distinct.values())


def map_state(
    state: Mapping[str, Any], change: Callable[[str, str | None, Any], Any]
) -> dict[str, Any]:
    """Return a state with changed tensors and optimizer state.

    ``change`` takes a parameter's name, an entry of its optimizer state or None, and the value.
    """
    changed = {**state, MODEL: {name: change(name, None, v) for name, v in state[MODEL].items()}}
    optimizer = state.get(OPTIMIZER)
    if optimizer is not None:
        named = {
            name: {key: change(name, key, value) for key, value in values.items()}
            for name, values in optimizer[NAMED_STATE].items()
        }
        changed[OPTIMIZER] = {**optimizer, NAMED_STATE: named}
    return changed


def split_state(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a rank's state into shared file and rank file, which share cfg and counters."""
    if not isinstance(state, Mapping) or not isinstance(state.get(MODEL), Mapping):
        raise CheckpointError(f"a state must be a dict with the parameters under {MODEL!r}")
    common = {key: value for key, value in state.items() if key not in (MODEL, OPTIMIZER, METADATA)}
    dense, expert = split_dense_expert(state[MODEL])
    shared, rank_state = common | {MODEL: dense}, common | {MODEL: expert}
    optimizer = state.get(OPTIMIZER)
    if optimizer is not None:
        if not optimizer_is_named(optimizer) or any(
            "params" in group for group in optimizer.get("param_groups", ())
        ):
            raise CheckpointError(
                f"{OPTIMIZER!r} must hold {NAMED_STATE!r}, the state keyed by parameter name, and "
                "param_groups without 'params': indices change with the number of ranks"
            )
        dense_state, expert_state = split_dense_expert(optimizer[NAMED_STATE])
        shared[OPTIMIZER] = optimizer | {NAMED_STATE: dense_state}
        rank_state[OPTIMIZER] = {NAMED_STATE: expert_state}
    return shared, rank_state


def join_state(
    shared: Mapping[str, Any], model: Mapping[str, Any], named_state: Mapping[str, Any]
) -> dict[str, Any]:
    """Join shared state with experts: the inverse of :func:`split_state`."""
    joined = {**shared, MODEL: {**shared[MODEL], **model}}
    optimizer = shared.get(OPTIMIZER)
    if optimizer is not None:
        joined[OPTIMIZER] = optimizer | {NAMED_STATE: {**optimizer[NAMED_STATE], **named_state}}
    return joined
