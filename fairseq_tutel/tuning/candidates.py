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
from .search.halving import Choice, list_choices

TUNABLE = ("algorithm", "overlap_degree", "r")
_MOST = 40  # choices of a search
_UNKNOWN_MEMORY = 1 << 40  # no limit where the system does not say


def build_choices(
    layers: Sequence[MoELayer], tuned: Sequence[str], everything: bool = False
) -> list[Choice]:
    """List the values of the fields in ``tuned``, the simplest first, at most 40. Collective.

    An algorithm stays if it fits the nodes with some r. With another r ``linear`` takes its place,
    and the times are equal. ``everything``: without the limits of memory and of the list.
    """
    base, groups = layers[0].exchange_config, layers[0].groups
    for name in tuned:
        if name not in TUNABLE:
            raise ValueError(f"{name!r} cannot be tuned; choose of {', '.join(TUNABLE)}")
    sizes, values = [base.r], {}
    if "r" in tuned and all(layer.experts.can_be_gathered for layer in layers):
        sizes = distributed.possible_r(groups) if everything else _r_in_memory(layers)
    if "algorithm" in tuned:
        values["algorithm"] = _algorithms_that_fit(layers, [r for r in sizes if r])
    if "overlap_degree" in tuned:
        values["overlap_degree"] = OVERLAP_DEGREES
    if len(sizes) > 1:
        values["r"] = sizes
    return list_choices(values, None if everything else _MOST)


def _algorithms_that_fit(layers: Sequence[MoELayer], sizes: Sequence[int]) -> Sequence[str]:
    """Return the algorithms that are used with some r. Collective."""
    base, names, fit = layers[0].exchange_config, exchange_candidates(), []
    for name in names:
        config = dataclasses.replace(base, algorithm=name)
        for layer in layers:
            layer.prepare_exchanges([config])
        configs = [dataclasses.replace(config, r=r) for r in sizes]
        if any(distributed.build_exchange(c, layers[0].groups).name == name for c in configs):
            fit.append(name)
    return fit or names[:1]


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
