"""Checkpoints of a run on several ranks, for any number of ranks.

A checkpoint ``X.pt`` is the index of a set of files, replaced as one; for a model without experts
it is the one file. All ranks use one shared file system.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...checkpoint import load_for_rank, save_set, set_exists, split_key, write_set
from ...checkpoint.state import MODEL, OPTIMIZER
from ...distributed import ExpertParallelGroups, gather_texts, process_world, shard_like
from ...moe.model import moe_layers, unwrap
from . import all_ranks
from .optimizer_state import FreshState, Optimizers, load_named_state, named_state
from .transforms import SAVE_TRANSFORMS, SaveTransform

# torch's message for a tensor of another shape
_SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((.*?)\) from checkpoint, "
    r"the shape in current model is torch\.Size\((.*?)\)\.?"
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Save weights, optimizer state and the caller's own state. Collective.

    An older checkpoint of the same name is replaced, but not after an error, which all ranks raise.

    >>> import os, tempfile, torch
    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> folder = tempfile.mkdtemp()
    >>> path = save_checkpoint(f"{folder}/last.pt", layer, optimizer, {"step": 20})
    >>> sorted(name.partition("-")[2] for name in os.listdir(folder))  # last.pt, last.pt.ID-...
    ['', 'rank-0.pt', 'shared.pt']
    >>> load_checkpoint(path, layer, optimizer)
    {'step': 20}

    Args:
        path (str or Path): X.pt; missing folders are made.
        model (nn.Module): the model, wrapped or not. All its MoE layers have the same number of
            experts; without MoE layers the checkpoint is one file, X.pt.
        optimizer (torch.optim.Optimizer or list): one or several optimizers over its parameters
            (default None: weights only).
        extra (dict): step, state of a scheduler or scaler, ...: numbers, strings, tensors and
            containers of them (default None: empty). ``load_checkpoint`` returns rank 0's.

    Returns:
        str: the absolute path X.pt.
    """
    groups = placement_of(model)
    state = state_of_rank(model, optimizer, f"saving {path}")
    return save_state(os.fspath(path), {**state, "extra": dict(extra or {})}, groups)


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None = None
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint` in place, on any number of ranks. Collective.

    It also reads the weights of merged files and of sets that fairseq saved.

    Args:
        path (str or Path): X.pt.
        model (nn.Module): a model of the same sizes on its device, wrapped or not.
        optimizer (torch.optim.Optimizer or list): optimizers of the same kind over the same
            parameters, in the same order (default None: weights only).

    Returns:
        dict: ``extra`` of rank 0.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint is damaged, does not fit the model, has no optimizer state, or
            some ranks do not see it.
    """
    path = os.fspath(path)
    groups = placement_of(model)
    model = unwrap(model)
    if not checkpoint_exists(path):
        raise FileNotFoundError(f"{path}: no such checkpoint")
    state = load_state(path, groups, with_optimizer=optimizer is not None)
    own = model.state_dict()
    weights = {
        key: shard_like(value, own[key]) if key in own else value
        for key, value in state.pop(MODEL).items()
    }
    load_weights(model, weights, path)
    if optimizer is not None:
        stored = state.get(OPTIMIZER)
        if stored is None:
            raise ValueError(f"{path} holds no optimizer state: load the weights alone")
        load_named_state(optimizer, model, stored)
    return state.get("extra") or {}


def state_of_rank(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    what: str | None = None,
    fresh: FreshState | None = None,
) -> dict[str, Any]:
    """Return what :func:`save_state` takes; ``what`` and ``fresh`` go to :func:`named_state`."""
    model = unwrap(model)
    weights = model.state_dict()
    prefixes = tuple(placements_by_prefix(model))
    for name in weights:
        parsed = split_key(name)
        is_taken = parsed is not None or name.startswith(prefixes)
        if is_taken and not (parsed and parsed[0] in prefixes):
            raise ValueError(
                f"{name}: in a checkpoint, 'experts.NUMBER.' in a name stands for an expert of an "
                "MoELayer and for nothing else; give the module another name"
            )
    state: dict[str, Any] = {MODEL: weights}
    if optimizer is not None:
        state[OPTIMIZER] = named_state(optimizer, model, what, fresh)
    return state


def save_state(
    path: str,
    state: Mapping[str, Any],
    groups: ExpertParallelGroups,
    transforms: Iterable[SaveTransform] = SAVE_TRANSFORMS,
) -> str:
    """Write a checkpoint from a host's own dict, one part per rank. Collective.

    Args:
        path (str): X.pt.
        state (dict): ``model``: this rank's state dict, experts numbered from 0;
            ``last_optimizer_state``: result of :meth:`StateNames.to_named`; other entries go into
            every file. Dense entries are taken from rank 0.
        groups (ExpertParallelGroups): placement of the experts.
        transforms (iterable): steps from this state to the state in files, in order (default
            ``SAVE_TRANSFORMS``: gather slices and shards).

    Returns:
        str: the absolute path.
    """
    if groups.simulated:
        raise ValueError(f"not saving {path}: a simulated rank holds a part of the experts")
    for transform in transforms:
        state = transform(state, groups, f"saving {path}")
    if groups.num_experts:
        save_set(path, state, num_rank_files=groups.ep_size, ranks=all_ranks())
    else:

        def write() -> None:
            how: dict[str, Any] = {"num_experts": 0, "num_ranks": None, "in_place": True}
            write_set(path, state, lambda numbers: ({}, {}), **how)

        all_ranks().run_on_first(f"saving {path}", write)
    return os.path.abspath(path)


def load_state(
    path: str,
    groups: ExpertParallelGroups,
    *,
    with_optimizer: bool = True,
    otherwise: str = "build the model with num_experts={saved}",
    may_be_dense: bool = False,
) -> dict[str, Any]:
    """Read this rank's part of a checkpoint as :func:`save_state` takes it. Collective.

    Experts are whole, also if the model's are in slices.

    Args:
        path (str): X.pt.
        groups (ExpertParallelGroups): placement of the model's experts.
        with_optimizer (bool): read the optimizer state, too (default True).
        otherwise (str): advice for the error about another number of experts.
        may_be_dense (bool): accept a file without experts, for the caller to make them
            (default False).

    Returns:
        dict: see :func:`fairseq_tutel.checkpoint.load_for_rank`.
    """
    rank, world_size = process_world()
    is_chosen = groups.num_experts and groups.ep_size != min(groups.num_experts, groups.world_size)
    state = load_for_rank(
        path,
        rank=rank,
        world_size=world_size,
        expert_parallel_size=groups.ep_size if is_chosen else 0,
        with_optimizer=with_optimizer,
        gather_texts=gather_texts,
    )
    saved, wanted = (state["moe_checkpoint"] or {}).get("num_experts"), groups.num_experts
    is_dense = not any(split_key(name) for name in state["model"])
    if not (wanted or is_dense):
        raise ValueError(f"{path} has experts, and this model has no MoELayer: build it with them")
    if wanted and is_dense and not may_be_dense:
        raise ValueError(
            f"{path} is dense, this model has {wanted} experts in each MoE layer: make a set of "
            f"it by {_command('upcycle', path, wanted)}"
        )
    if wanted and saved not in (None, wanted):
        change = "grow" if wanted > saved else "shrink"
        raise ValueError(
            f"{path} has {saved} experts in each MoE layer, this model has {wanted}: "
            f"{otherwise.format(saved=saved)}, or make a set of {wanted} by "
            f"{_command(change, path, wanted)}"
        )
    return state


def _command(name: str, path: str, num_experts: int) -> str:
    tool = "python -m fairseq_tutel.checkpoint"
    return f"{tool} {name} {path} OUT.pt --num-experts {num_experts}"


def checkpoint_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint exists, the same on all ranks. Collective.

    Args:
        path (str or Path): X.pt; ValueError if only some ranks see it, because the others would
            start afresh while these wait.
    """
    seen = gather_texts("seen" if set_exists(os.fspath(path)) else None)
    missing = [rank for rank, text in enumerate(seen) if text is None]
    if 0 < len(missing) < len(seen):
        raise ValueError(
            f"{path}: ranks {missing} of {len(seen)} do not see it; use one shared file system"
        )
    return not missing


def load_weights(module: nn.Module, weights: Mapping[str, Any], source: str, **options) -> None:
    """Load a state dict strictly; not collective. A ValueError is one line that names the source.

    Args:
        module (nn.Module): the module to load into.
        weights (dict): tensors by name.
        source (str): origin of the weights, for the error.
        **options: arguments of ``module.load_state_dict``, such as ``assign`` (default: torch's).
    """
    try:
        module.load_state_dict(weights, strict=True, **options)
    except RuntimeError as error:
        rows = str(error).split("\n")
        first, *others = [" ".join(row.split()) for row in rows[1:] or rows]  # [0] names the class
        shown = _SIZES.sub(r"\1 is \2 in the checkpoint, \3 in the model", first)[:200]
        raise ValueError(
            f"{source} does not fit this model; check that the architectures match: {shown}"
            + (f"; and {len(others)} more" if others else "")
        ) from None


def placements_by_prefix(model: nn.Module) -> dict[str, ExpertParallelGroups]:
    """Return the placement of each MoE layer by the prefix of its experts' names."""
    layers = moe_layers(model).items()
    return {f"{path}.experts.".lstrip("."): layer.groups for path, layer in layers}


def placement_of(model: nn.Module) -> ExpertParallelGroups:
    """Return the placement that all MoE layers of a model share; 0 experts if it has no layer."""
    layers = moe_layers(model)
    if not layers:
        rank, world_size = process_world()
        return ExpertParallelGroups(0, rank, world_size, num_replicas=world_size)
    (name, first), *others = layers.items()
    for other, layer in others:
        for what in ("num_experts", "ep_size", "num_slices"):
            mine, theirs = getattr(first.groups, what), getattr(layer.groups, what)
            if mine != theirs:
                raise ValueError(
                    f"the MoE layers of a checkpoint have one {what}, but {name or 'the model'} "
                    f"has {mine} and {other} has {theirs}"
                )
    return first.groups
