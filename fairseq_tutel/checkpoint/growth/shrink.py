"""Fewer experts, or none: the way back. What is left out or averaged is gone, so that the function
changes; a program that compares the loss before and after is in :mod:`.validation`.

A dense model has one FFN for the experts of each layer: one expert, the mean of all, or the shared
expert. It is exact where the experts never parted, as after :mod:`.upcycle`.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ..layout import CheckpointError, split_key
from ..reader import SetReader, read_set
from ..state import GROWTH, METADATA, MODEL, OPTIMIZER, options_of, with_options
from ..store import write_set
from .grow import for_other_experts, ranks_of
from .history import Growth, refuse_while_held, updates_done, with_entry
from .recipes import (
    Recipe,
    even_load,
    load_file_beside,
    merged_pairs,
    most_loaded,
    read_load,
    weighted,
)
from .recombine import Recombined, layers_of
from .upcycle import CRITERIONS

logger = logging.getLogger(__name__)

HOW = ("drop", "merge")
DENSE = ("one", "mean", "shared")


def shrink(
    src: str,
    dst: str,
    num_experts: int,
    *,
    how: str = "drop",
    load: str | None = None,
    ranks: int | None = None,
    force: bool = False,
) -> str:
    """Write a set with fewer experts.

    Args:
        src, dst, load, ranks, force: as of :func:`.grow.grow`.
        num_experts: E2 < E.
        how: ``drop`` keeps the most loaded of each layer, to the bit; ``merge`` makes one of
            the two whose router rows are the most alike, weighted by their load, and so on.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: as of :func:`.grow.grow`; K is larger than E2.
    """
    source = _open(src)
    top_k = options_of(source.shared).get("moe_top_k") or 1
    if not 0 < num_experts < source.num_experts or num_experts < top_k:
        raise CheckpointError(
            f"{src}: has {source.num_experts} experts, of which a token chooses {top_k}; "
            f"--num-experts {num_experts} must be fewer, and not fewer than that"
        )
    ranks = ranks_of(source, num_experts, ranks)
    layers = layers_of(source)
    loads = _loads(source, src, load, needed=how == "drop")
    recipe: Recipe = {layer: most_loaded(loads[layer], num_experts) for layer in layers}
    if how == "merge":
        rows = _router_rows(source, layers, src)
        recipe = {layer: merged_pairs(loads[layer], rows[layer], num_experts) for layer in layers}
    fewer = Recombined(source, recipe)
    words = {"drop": "the least loaded dropped", "merge": "pairs merged by their router rows"}
    shared = _finished(
        source, fewer.shared_state(), words[how], num_experts, {"moe_expert_count": num_experts}
    )
    return write_set(
        dst, shared, fewer.experts,
        num_experts=num_experts, num_ranks=ranks, source=source, force=force,
    )  # fmt: skip


def to_dense(
    src: str, dst: str, how: str = "mean", *, load: str | None = None, force: bool = False
) -> str:
    """Write a dense model of stock fairseq, one file without optimizer state.

    Args:
        src, dst, load, force: as of :func:`.grow.grow`.
        how: what becomes the FFN of a layer: ``one``: its most loaded expert; ``mean``: the mean
            of all, weighted by their load; ``shared``: the shared expert.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: as of :func:`.grow.grow`; experts are gated, or of another width than the
            model's FFNs, which have one width; a shared expert is there or is not.
    """
    source = _open(src)
    layers = layers_of(source)
    loads = even_load(source.num_experts, layers)
    if how != "shared":
        loads = _loads(source, src, load, needed=how == "one")
    experts = range(source.num_experts)
    recipe: Recipe = {layer: [weighted(experts, loads[layer])] for layer in layers}
    if how == "one":
        recipe = {layer: most_loaded(loads[layer], 1) for layer in layers}
    ffns = Recombined(source, recipe)
    shared = source.shared_state(with_optimizer=False)
    model = {name: value for name, value in shared[MODEL].items() if not _of_layer(name, layers)}
    of_experts = {name: value for name, value in shared[MODEL].items() if "shared_expert." in name}
    if bool(of_experts) != (how == "shared"):
        there = "a shared expert" if of_experts else "no shared expert"
        right = "shared" if of_experts else "one or --dense mean"
        raise CheckpointError(f"{src}: has {there} beside the experts; give --dense {right}")
    if how != "shared":
        of_experts = ffns.experts(range(1))[0]
    for name, value in of_experts.items():
        model[_dense_name(name)] = value
    _check_ffns(model, src)
    options = _dense_options(shared, model, src)
    words = {"one": "the most loaded expert", "mean": "mean of the experts"}
    state = _finished(source, shared, words.get(how, "the shared expert"), 0, options)
    state = _as_stock({**state, MODEL: model})
    return write_set(
        dst, state, lambda wanted: ({}, {}),
        num_experts=0, num_ranks=None, source=source, force=force,
    )  # fmt: skip


def _open(src: str) -> SetReader:
    source = read_set(src)
    if not source.num_experts:
        raise CheckpointError(f"{src}: is dense already")
    refuse_while_held(source.shared, src)
    return source


def _loads(source: SetReader, src: str, load: str | None, needed: bool) -> dict[str, list[float]]:
    layers = layers_of(source)
    try:
        return read_load(load or load_file_beside(src), source.num_experts, layers)
    except CheckpointError as error:
        if needed or load is not None:
            raise
        logger.warning("%s; all experts count alike", error)
        return even_load(source.num_experts, layers)


def _router_rows(source: SetReader, layers: list[str], src: str) -> dict[str, Any]:
    as_they_are = Recombined(source, {layer: [()] * source.num_experts for layer in layers})
    found = {}
    for layer in layers:
        rows = [v for _, v in as_they_are.rows(source.shared[MODEL], layer) if v.dim() > 1]
        if len(rows) != 1:
            raise CheckpointError(
                f"{src}: the router of {layer.rstrip('.')} has no rows to compare: --by drop"
            )
        found[layer] = rows[0][: source.num_experts]
    source.check(found)
    return found


def _finished(
    source: SetReader, shared: Mapping[str, Any], how: str, num_experts: int, options: dict
) -> dict[str, Any]:
    """The state with its options, and an entry in its history."""
    entry = Growth("shrink", how, source.num_experts, num_experts, updates_done(shared))
    state = with_options(for_other_experts(shared), options)
    return {**state, GROWTH: with_entry(state, entry)}


def _of_layer(name: str, layers: list[str]) -> bool:
    return any(name.startswith(layer) for layer in layers)


def _dense_name(name: str) -> str:
    """``X.moe_layer.experts.0.fc1.weight``, or of the shared expert -> ``X.fc1.weight``."""
    parsed = split_key(name)
    prefix, rest = (parsed[0], parsed[2][1:]) if parsed else name.split("shared_expert.")
    return prefix.removesuffix("experts.").removesuffix("moe_layer.") + rest


def _check_ffns(model: Mapping[str, Any], src: str) -> None:
    if gated := [name for name in model if ".fc_gate." in name]:
        raise CheckpointError(f"{src}: {gated[0]}: stock fairseq has no gated FFN")
    for side in ("encoder", "decoder"):
        widths = {
            value.shape[0]: name
            for name, value in model.items()
            if f"{side}.layers." in name and name.endswith(".fc1.weight")
        }
        if len(widths) > 1:
            raise CheckpointError(
                f"{src}: FFNs of {' and '.join(map(str, sorted(widths)))} hidden units "
                f"({', '.join(widths.values())}), and a dense model has one width: experts must "
                "have that of the dense layers"
            )


def _dense_options(shared: Mapping[str, Any], model: Mapping[str, Any], src: str) -> dict:
    """Changes to the options of the model: none of experts, and the dense model's name."""
    options = options_of(shared)
    for name in ("moe_cmr", "use_stable_embedding"):
        if options.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{src}: stock fairseq has no model with {flag}")
    changes: dict[str, Any] = {name: None for name in options if "moe_" in name}
    for side in ("encoder", "decoder"):
        for name, value in model.items():
            if f"{side}.layers." in name and name.endswith(".fc1.weight"):
                changes[f"{side}_ffn_embed_dim"] = value.shape[0]
    for name in ("_name", "arch"):
        if options.get(name):
            changes[name] = str(options[name]).partition("_moe")[0]
    return changes


def _as_stock(state: dict[str, Any]) -> dict[str, Any]:
    """As stock fairseq writes it: its criterion, and a transformer's options as a namespace."""
    names = {mine: stock for stock, mine in CRITERIONS.items()}
    state["optimizer_history"] = [
        {**entry, "criterion_name": names.get(entry.get("criterion_name"))
         or entry.get("criterion_name")}
        for entry in state.get("optimizer_history") or ()
    ]  # fmt: skip
    criterion = options_of(state, "criterion").get("_name")
    if isinstance(state.get("cfg"), Mapping) and str(criterion).startswith("moe_"):
        kept = {name: None for name in options_of(state, "criterion") if "moe_" in name}
        kept["_name"] = criterion.removeprefix("moe_")
        state = with_options(state, kept, "criterion")
    options = options_of(state)
    if "encoder_layers" in options and isinstance(state.get("cfg"), Mapping):
        state["cfg"] = {**state["cfg"], "model": Namespace(**options)}
    return {key: value for key, value in state.items() if key not in (OPTIMIZER, METADATA)}
