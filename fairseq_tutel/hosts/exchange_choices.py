"""What the tuner of a run may choose, and what its times depend on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..distributed import (
    Exchange,
    build_exchange,
    gather_texts,
    possible_r,
    process_world,
    ranks_per_node,
)
from ..distributed.exchanges import AutoExchange
from ..moe import Experts, MoELayer
from ..tuning import Axis

DEGREES = (1, 2, 4, 8)
TUNABLE = ("algorithm", "overlap_degree", "r")


def build_choices(
    layers: Sequence[MoELayer], tuned: Sequence[str]
) -> tuple[list[Axis], dict[tuple[str, int], bool]]:
    """Build everything that can be chosen. Collective.

    Args:
        layers: alike.
        tuned: of ``TUNABLE``.

    Returns:
        An axis for each of them, and whether an algorithm serves the ranks of an r (where it does
        not fit the nodes, ``linear`` takes its place, which is a choice of its own).

    Raises:
        ValueError: not of ``TUNABLE``.
    """
    base, groups = layers[0].exchange_config, layers[0].groups
    for name in tuned:
        if name not in TUNABLE:
            raise ValueError(f"{name!r} cannot be tuned; choose of {', '.join(TUNABLE)}")
    own = all(isinstance(layer.experts, Experts) for layer in layers)
    sizes = possible_r(groups) if "r" in tuned and own else [base.r]
    axes, serves = [], {}
    if "algorithm" in tuned:
        names = ["linear", "2dh"]
        if base.algorithm not in ("auto", *names):
            names.insert(0, base.algorithm)
        for name in names:
            config = dataclasses.replace(base, algorithm=name)
            for layer in layers:
                layer.prepare_exchanges([config])
            for r in sizes:
                built = build_exchange(dataclasses.replace(config, r=r), groups).name
                serves[name, r] = r == 0 or built == name
        fit = [name for name in names if any(serves[name, r] for r in sizes if r)]
        axes.append(Axis("algorithm", tuple(fit or names[:1]), ordered=False))
    if "overlap_degree" in tuned:
        axes.append(Axis("overlap_degree", DEGREES))
    if len(sizes) > 1:
        axes.append(Axis("r", tuple(r for r in sizes if r), apart=(0,)))
    return axes, serves


def as_measured_on_rank_0(layer: MoELayer) -> Exchange:
    """The layer's exchange for a message's size as all ranks choose it; not to be used for more.

    Groups of ranks that exchange tokens measure ``auto`` each by themselves. Collective.
    """
    built = build_exchange(layer.exchange_config, layer.groups)
    if layer.exchange_config.algorithm != "auto":
        return built
    seconds = json.loads(gather_texts(json.dumps(getattr(built, "seconds", {})))[0])
    same = AutoExchange(layer.groups)
    same.seconds = seconds
    return same


def alike(layers: Sequence[MoELayer]) -> MoELayer:
    """Any of the layers.

    Raises:
        ValueError: there is none, or they differ.
    """
    if not layers:
        raise ValueError("there is no MoELayer to tune")
    first = layers[0]
    for layer in layers[1:]:
        for name, mine, other in (
            ("model_dim", layer.model_dim, first.model_dim),
            ("config", layer.config, first.config),
            ("exchange", layer.exchange_config, first.exchange_config),
        ):
            if mine != other:
                raise ValueError(f"layers of one tuner have one {name}, not {other} and {mine}")
    return first


def signature(layer: MoELayer) -> dict[str, Any]:
    """What times depend on. Collective when first made."""
    device = next(layer.parameters()).device
    on_gpu = device.type == "cuda"
    nccl = torch.cuda.nccl.version() if on_gpu else None
    return {
        "ranks": process_world()[1],
        "ranks_per_node": layer.exchange_config.ranks_per_node or ranks_per_node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }


def free_memory(device: torch.device) -> int:
    """Bytes that this rank could take: of its GPU, or its share of what the machine has left."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    # another kind of system does not say; ranks on unequal nodes are taken to be on one
    kibibytes = found[0] if found else 1 << 40
    return 1024 * kibibytes // (ranks_per_node() or process_world()[1])
