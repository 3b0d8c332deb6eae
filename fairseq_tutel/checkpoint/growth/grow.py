"""More experts: copies of those that there are, with router rows that are almost theirs.

With K choices as before, a token that chose an expert may now choose both copies of it, or one: the
function changes. ``exact`` keeps it: the copies are held back by the load bias (:mod:`.history`)
and come in over some updates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import CheckpointError, count_rank_files
from ..reader import SetReader, read_set
from ..state import GROWTH, MODEL, NAMED_STATE, OPTIMIZER, options_of, with_options
from ..store import write_set
from .history import Growth, held_back_by, refuse_while_held, updates_done, with_entry
from .recipes import copies, even_load, is_copy, load_file_beside, read_load
from .recombine import Recombined, layers_of

logger = logging.getLogger(__name__)

_LOAD_BIAS, _MASTER = "load_bias", "fp32_weight"
# of a run with another number of experts: sums of their load, choices by their sizes
_OF_RUN = ("moe_expert_load", "moe_tuner")


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
        dst: X.pt of the new one.
        num_experts: E2 > E.
        by: ``uniform``: every expert is copied as often as others; ``load``: the most loaded first,
            in every layer by itself.
        load: the run's ``expert_load.jsonl``; None: that beside ``src``.
        ramp: > 0: the function stays what it is, and the copies come in over so many updates.
        noise: deviation of what is added to a copy's router row, times that of all rows.
        seed: of it.
        ranks: W of the new set; None: as many files as ``src`` has.
        force: replace what ``dst`` names.
        in_place: whether ``dst`` may be ``src``, which is replaced in one step.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: there are no experts, as many, or still held ones; the load is unknown; the
            function cannot be kept; or as of :func:`..store.write_set`.
    """
    source = read_set(src)
    _check(source, src, num_experts)
    if ramp:
        _check_exact(source, src)
    ranks = ranks_of(source, num_experts, ranks)
    layers = layers_of(source)
    loads = even_load(source.num_experts, layers)
    if by == "load":
        loads = read_load(load or load_file_beside(src), source.num_experts, layers)
    recipe = {layer: copies(loads[layer], num_experts) for layer in layers}
    grown = Recombined(source, recipe)
    shared = grown.shared_state()
    _separate(grown, shared, noise, seed)
    held = {}
    if ramp:
        held = {layer: _numbers(is_copy(experts)) for layer, experts in recipe.items()}
        shared = _hold_back(grown, shared, held)
    entry = Growth(
        "grow", "copies of the most loaded" if by == "load" else "copies of each in turn",
        source.num_experts, num_experts, updates_done(shared), ramp, held,
    )  # fmt: skip
    shared = with_options(for_other_experts(shared), {"moe_expert_count": num_experts})
    shared[GROWTH] = with_entry(shared, entry)
    return write_set(
        dst, shared, grown.experts,
        num_experts=num_experts, num_ranks=ranks, source=source, force=force, in_place=in_place,
    )  # fmt: skip


def ranks_of(source: SetReader, num_experts: int, ranks: int | None) -> int | None:
    """W of a new set, None for a merged file; CheckpointError where E and W do not divide."""
    if ranks is None:
        ranks = source.num_rank_files if source.kind == "set" else None
    if ranks is not None:
        try:
            count_rank_files(num_experts, ranks)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; --ranks chooses another number") from None
    return ranks


def for_other_experts(shared: Mapping[str, Any]) -> dict[str, Any]:
    """A state without what a run knew of its experts by their number."""
    extra = shared.get("extra_state")
    if not isinstance(extra, Mapping):
        return dict(shared)
    kept = {name: value for name, value in extra.items() if name not in _OF_RUN}
    return {**shared, "extra_state": kept}


def _check(source: SetReader, src: str, num_experts: int) -> None:
    if not source.num_experts:
        raise CheckpointError(f"{src}: is dense; `upcycle` makes experts of it")
    if num_experts <= source.num_experts:
        raise CheckpointError(
            f"{src}: has {source.num_experts} experts, {num_experts} are not more; `shrink` makes "
            "fewer of them"
        )
    refuse_while_held(source.shared, src)


def _check_exact(source: SetReader, src: str) -> None:
    options = options_of(source.shared)
    if not options:
        logger.warning("%s does not say K: with K = 1 the start is not exact", src)
    top_k = 1 if options.get("moe_top1_expert") else options.get("moe_top_k") or 2
    softmax = str(options.get("moe_score_function") or "softmax") == "softmax"
    if softmax and (top_k == 1 or options.get("moe_unnormalized_weights")):
        raise CheckpointError(
            f"{src}: its softmax is over all experts, and weights are not shares of the K chosen "
            "ones (K = 1, or --moe-unnormalized-weights), so that further experts change them "
            "also while they are held back: leave out --exact"
        )


def _separate(grown: Recombined, shared: Mapping[str, Any], noise: float, seed: int) -> None:
    """Add noise to the router rows of copies, in place; of a weight and its fp32 copy the same."""
    generator = torch.Generator().manual_seed(seed)
    named = (shared.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    for layer, experts in grown.recipe.items():
        new = _numbers(is_copy(experts))
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
    grown: Recombined, shared: dict[str, Any], held: Mapping[str, list[int]]
) -> dict[str, Any]:
    """With a load bias that keeps those experts out, and options that have one."""
    model = dict(shared[MODEL])
    for layer, numbers in held.items():
        name = f"{layer}gate.{_LOAD_BIAS}"
        bias: Tensor = model.get(name, torch.zeros(grown.num_outputs))
        model[name] = bias.index_fill(0, torch.tensor(numbers), held_back_by(1.0))
    changes = {"moe_second_expert_policy": "all"}
    if str(options_of(shared).get("moe_load_bias") or "none") == "none":
        changes["moe_load_bias"] = "quantile"
        logger.info("the new set has a load bias: train on with --moe-load-bias quantile")
    return with_options({**shared, MODEL: model}, changes)


def _numbers(marks: list[bool]) -> list[int]:
    return [number for number, marked in enumerate(marks) if marked]
