"""What the tuner of a run may choose, and what its times depend on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import OVERLAP_DEGREES
from ..distributed import (
    build_exchange,
    expert_parallelism,
    gather_integers,
    possible_r,
    process_world,
    ranks_per_node,
)
from ..distributed.exchanges import exchange_candidates
from ..moe import MoELayer
from .search.search import Axis

TUNABLE = ("algorithm", "overlap_degree", "r")


def build_choices(layers: Sequence[MoELayer], tuned: Sequence[str], all_r=False) -> list[Axis]:
    """Build everything that can be chosen, an axis for each thing ``tuned``. Collective.

    An algorithm that fits the nodes with some r only stays: with another r, ``linear`` is in its
    place, whose time is a tie. ``all_r``: also those whose weights do not fit in memory.
    """
    base, groups = layers[0].exchange_config, layers[0].groups
    for name in tuned:
        if name not in TUNABLE:
            raise ValueError(f"{name!r} cannot be tuned; choose of {', '.join(TUNABLE)}")
    sizes = [base.r]
    if "r" in tuned and all(layer.experts.can_be_gathered for layer in layers):
        sizes = possible_r(groups) if all_r else _r_in_memory(layers)
    axes = []
    if "algorithm" in tuned:
        names, fit = exchange_candidates(), []
        for name in names:
            config = dataclasses.replace(base, algorithm=name)
            for layer in layers:
                layer.prepare_exchanges([config])
            configs = [dataclasses.replace(config, r=r) for r in sizes if r]
            if any(build_exchange(each, groups).name == name for each in configs):
                fit.append(name)
        axes.append(Axis("algorithm", tuple(fit or names[:1]), ordered=False))
    if "overlap_degree" in tuned:
        axes.append(Axis("overlap_degree", OVERLAP_DEGREES))
    if len(sizes) > 1:
        ordered = tuple(r for r in sizes if r)
        axes.append(Axis("r", ordered, standalone=(0,) if 0 in sizes else ()))
    return axes


def _r_in_memory(layers) -> list[int]:
    """The layers' own r, and those whose gathered weights take half of the least free memory, at
    most. Collective."""
    groups, own = layers[0].groups, layers[0].exchange_config.r
    free = _free_memory(next(layers[0].parameters()).device)
    if process_world()[1] > 1:
        free = min(line[0] for line in gather_integers([free]))
    held = sum(param.nbytes for layer in layers for param in layer.experts.parameters())

    def fits(r):
        gathered = expert_parallelism(groups, r).gather_size
        return gathered == 1 or 2 * held * gathered <= free

    return [r for r in possible_r(groups) if r == own or fits(r)]


def _free_memory(device: torch.device) -> int:
    """Bytes that this rank could take of its GPU, or of what the machine has left."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    found = meminfo.exists() and re.search(r"MemAvailable: +(\d+)", meminfo.read_text("ascii"))
    # another kind of system does not say; ranks on unequal nodes are taken to be on one
    return 1024 * (int(found[1]) if found else 1 << 40) // (ranks_per_node() or process_world()[1])


def check_layers_match(layers: Sequence[MoELayer]) -> MoELayer:
    """One of the layers; ValueError if there is none, or they are not alike."""
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
    """What times depend on. Collective when first made."""
    device = next(layer.parameters()).device
    on_gpu = device.type == "cuda"
    return {
        "ranks": process_world()[1],
        "ranks_per_node": layer.exchange_config.ranks_per_node or ranks_per_node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }
