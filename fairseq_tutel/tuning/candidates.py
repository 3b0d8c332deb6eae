"""Candidates of the tuner, and the machine on which their times are valid."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .. import distributed
from ..config import OVERLAP_DEGREES
from ..distributed.exchanges import exchange_candidates
from ..moe import MoELayer
from ..moe.memory import free_memory
from .search.search import Axis

TUNABLE = ("algorithm", "overlap_degree", "r")
_UNKNOWN_MEMORY = 1 << 40  # no limit where the system does not say


def build_choices(layers: Sequence[MoELayer], tuned: Sequence[str], all_r=False) -> list[Axis]:
    """Build the axes of the search, one for each field in ``tuned``. Collective.

    An algorithm stays if it fits the nodes with some r. With another r ``linear`` takes its place,
    and the times are equal. ``all_r`` includes r whose gathered weights do not fit in memory.
    """
    base, groups = layers[0].exchange_config, layers[0].groups
    for name in tuned:
        if name not in TUNABLE:
            raise ValueError(f"{name!r} cannot be tuned; choose of {', '.join(TUNABLE)}")
    sizes = [base.r]
    if "r" in tuned and all(layer.experts.can_be_gathered for layer in layers):
        sizes = distributed.possible_r(groups) if all_r else _r_in_memory(layers)
    axes = []
    if "algorithm" in tuned:
        names, fit = exchange_candidates(), []
        for name in names:
            config = dataclasses.replace(base, algorithm=name)
            for layer in layers:
                layer.prepare_exchanges([config])
            configs = [dataclasses.replace(config, r=r) for r in sizes if r]
            if any(distributed.build_exchange(each, groups).name == name for each in configs):
                fit.append(name)
        axes.append(Axis("algorithm", tuple(fit or names[:1]), ordered=False))
    if "overlap_degree" in tuned:
        axes.append(Axis("overlap_degree", OVERLAP_DEGREES))
    if len(sizes) > 1:
        ordered = tuple(r for r in sizes if r)
        axes.append(Axis("r", ordered, standalone=(0,) if 0 in sizes else ()))
    return axes


def _r_in_memory(layers) -> list[int]:
    """Return own r, and each r whose weights fit in half of all ranks' free memory. Collective."""
    groups, own = layers[0].groups, layers[0].exchange_config.r
    device, world_size = next(layers[0].parameters()).device, distributed.process_world()[1]
    free = free_memory(device)
    if free is None:
        free = _UNKNOWN_MEMORY
    if device.type != "cuda":  # unequal nodes: as if all ranks were on one
        free //= distributed.ranks_per_node() or world_size
    if world_size > 1:
        free = min(line[0] for line in distributed.gather_integers([free]))
    held = sum(param.nbytes for layer in layers for param in layer.experts.parameters())

    def fits(r):
        gathered = distributed.expert_parallelism(groups, r).gather_size
        return gathered == 1 or 2 * held * gathered <= free

    return [r for r in distributed.possible_r(groups) if r == own or fits(r)]


def check_layers_match(layers: Sequence[MoELayer]) -> MoELayer:
    """Return one of the layers; raise ValueError if there is none, or if they differ."""
    if not layers:
        raise ValueError("there is no MoELayer to tune")
    first = layers[0]
    for layer in layers[1:]:
        for name in ("model_dim", "config", "exchange_config"):
            mine, other = getattr(layer, name), getattr(first, name)
            if mine != other:
                raise ValueError(f"layers of one tuner have one {name}, not {other} and {mine}")
    return first


def signature(layer: MoELayer) -> dict[str, Any]:
    """Return ranks, nodes, device and versions, on which times depend. Collective on first call."""
    device = next(layer.parameters()).device
    on_gpu = device.type == "cuda"
    return {
        "ranks": distributed.process_world()[1],
        "ranks_per_node": layer.exchange_config.ranks_per_node or distributed.ranks_per_node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }
