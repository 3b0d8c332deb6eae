"""More experts: copies of those of a set, with router rows that differ a little.

A token that chose an expert may now choose two copies of it, so the function changes. ``ramp``
keeps the function: the load bias holds the copies back at first and lets them in over some updates
(:mod:`.history`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import CheckpointError
from ..state import MODEL, NAMED_STATE, OPTIMIZER, options_of
from .change import Change, open_sparse, ranks_of
from .history import Growth, held_back_by, updates_done
from .load import even_load, read_load
from .selection import Selection, copies, layers_of, repeated

logger = logging.getLogger(__name__)

_LOAD_BIAS, _MASTER = "load_bias", "fp32_weight"


def grow(
    src: str,
    dst: str,
    num_experts: int,
    *,
    by: str = "uniform",
    load: str | None = None,
    ramp: int = 0,
    noise: float = 0.01,
    seed: int = 1,
    ranks: int | None = None,
    force: bool = False,
    in_place: bool = False,
) -> str:
    """Write a set with more experts.

    Args:
        src: a set or merged file of any number of ranks.
        dst: X.pt of the new set.
        num_experts: E2 > E.
        by: ``uniform`` copies each expert equally often; ``load`` copies the most loaded first, in
            each layer separately.
        load: the run's ``expert_load.jsonl``; None: the one beside ``src``.
        ramp: updates over which the copies come in, while the function starts unchanged; 0: at
            once.
        noise: standard deviation of the noise on a copy's router row, relative to that of all rows.
        seed: seed of the noise.
        ranks: W of the new set; None: as many as ``src`` has rank files.
        force: replace what ``dst`` names.
        in_place: allow ``dst`` to be ``src``, which is replaced in one step.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: ``src`` has no experts, already as many, or experts that are held back; the
            load is unknown; the function cannot be kept; or as of :func:`..store.write_set`.
    """
    source = open_sparse(src)
    if num_experts <= source.num_experts:
        raise CheckpointError(
            f"{src}: has {source.num_experts} experts, {num_experts} are not more; `shrink` makes "
            "fewer of them"
        )
    if ramp:
        options = options_of(source.shared)
        if not options:
            logger.warning("%s does not say K: with K = 1 the start is not exact", src)
        if reason := why_inexact(options):
            raise CheckpointError(f"{src}: {reason}: leave out --exact")
    layers = layers_of(source)
    loads = even_load(source.num_experts, layers)
    if by == "load":
        loads = read_load(src, load, source.num_experts, layers)
    chosen = Selection(source, {layer: copies(loads[layer], num_experts) for layer in layers})
    shared = chosen.shared_state()
    _add_noise(chosen, shared, noise, seed)
    held: dict[str, list[int]] = {}
    changes: dict[str, Any] = {"moe_expert_count": num_experts}
    if ramp:
        held = {layer: repeated(experts) for layer, experts in chosen.choice.items()}
        shared[MODEL] = _hold_back(chosen, shared[MODEL], held)
        changes["moe_second_expert_policy"] = "all"
        if str(options.get("moe_load_bias") or "none") == "none":
            changes["moe_load_bias"] = "quantile"
    words = "copies of the most loaded" if by == "load" else "copies of each in turn"
    before, done = source.num_experts, updates_done(shared)
    entry = Growth("grow", words, before, num_experts, done, ramp, held)
    change = Change(source, shared, chosen.experts, entry, changes)
    return change.write(dst, ranks_of(source, ranks), force=force, in_place=in_place)


def why_inexact(options: Mapping[str, Any]) -> str:
    """Return why held back experts change the function of a model with these options, or ""."""
    top_k = 1 if options.get("moe_top1_expert") else options.get("moe_top_k") or 2
    softmax = str(options.get("moe_score_function") or "softmax") == "softmax"
    if softmax and (top_k == 1 or options.get("moe_unnormalized_weights")):
        return (
            "with K = 1 or --moe-unnormalized-weights a weight is the softmax over all experts, so "
            "that new experts change the function even while they are held back"
        )
    return ""


def _add_noise(grown: Selection, shared: Mapping[str, Any], noise: float, seed: int) -> None:
    """Add noise to the router rows of copies, in place; the same to a weight and its fp32 copy."""
    generator = torch.Generator().manual_seed(seed)
    named = (shared.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    for layer, experts in grown.choice.items():
        new = repeated(experts)
        for name, rows in grown.rows(shared[MODEL], layer):
            if name.endswith(_LOAD_BIAS) or not noise:
                continue
            master = (named.get(name) or {}).get(_MASTER)
            exact = rows if master is None else master
            drawn = torch.randn((len(new), *rows.shape[1:]), generator=generator)
            exact[new] += (noise * float(exact.double().std()) * drawn).to(exact.dtype)
            if master is not None:
                rows[new] = master[new].to(rows.dtype)


def _hold_back(
    grown: Selection, model: Mapping[str, Any], held: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Return the model with a load bias that keeps these experts out of the K best."""
    changed = dict(model)
    for layer, numbers in held.items():
        name = f"{layer}gate.{_LOAD_BIAS}"
        bias: Tensor = model.get(name, torch.zeros(grown.num_experts + grown.num_nulls))
        changed[name] = bias.index_fill(0, torch.tensor(numbers), held_back_by(1.0))
    return changed
