"""Fewer experts, or a dense model. What is dropped or averaged is lost, so the function changes.

In a dense model one FFN replaces the experts of a layer: one expert, the mean of all, or the shared
expert. The function is kept if the experts are still equal, as right after :mod:`.upcycle`.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..layout import CheckpointError, split_key
from ..reader import SetReader
from ..state import METADATA, MODEL, OPTIMIZER, options_of, with_options
from .change import Change, open_sparse, ranks_of
from .history import Growth, updates_done
from .load import Load, even_load, read_load
from .selection import Selection, layers_of, most_loaded
from .upcycle import CRITERIONS

logger = logging.getLogger(__name__)

DENSE = ("one", "mean", "shared")


def shrink(
    src: str,
    dst: str,
    num_experts: int,
    *,
    load: str | None = None,
    ranks: int | None = None,
    force: bool = False,
) -> str:
    """Write a set with the most loaded experts of each layer; they keep every bit.

    Args:
        src, dst, load, ranks, force: see :func:`.grow.grow`.
        num_experts: E2 < E.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: as of :func:`.grow.grow`; or K is larger than E2.
    """
    source = open_sparse(src)
    top_k = options_of(source.shared).get("moe_top_k") or 1
    if not top_k <= num_experts < source.num_experts:
        raise CheckpointError(
            f"{src}: has {source.num_experts} experts, of which a token chooses {top_k}; "
            f"--num-experts {num_experts} must be fewer than the first, and not fewer than the "
            "second number"
        )
    loads = read_load(src, load, source.num_experts, layers_of(source))
    choice = {layer: most_loaded(each, num_experts) for layer, each in loads.items()}
    chosen = Selection(source, choice)
    shared = chosen.shared_state()
    entry = Growth(
        "shrink", "the least loaded dropped", source.num_experts, num_experts, updates_done(shared)
    )
    change = Change(source, shared, chosen.experts, entry, {"moe_expert_count": num_experts})
    return change.write(dst, ranks_of(source, ranks), force=force)


def to_dense(
    src: str, dst: str, how: str = "mean", *, load: str | None = None, force: bool = False
) -> str:
    """Write a dense model for stock fairseq, one file without optimizer state.

    Args:
        src, dst, load, force: see :func:`.grow.grow`.
        how: the FFN of a layer: ``one``: its most loaded expert; ``mean``: the mean of all experts,
            weighted by load; ``shared``: the shared expert.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: as of :func:`.grow.grow`; experts are gated, or not as wide as the dense
            FFNs; or ``how`` does not fit a model with, or without, shared experts.
    """
    source = open_sparse(src)
    layers = layers_of(source)
    shared = source.shared_state(with_optimizer=False)
    shared_experts = {n: each for n, each in shared[MODEL].items() if "shared_expert." in n}
    if bool(shared_experts) != (how == "shared"):
        there = "a shared expert" if shared_experts else "no shared expert"
        right = "shared" if shared_experts else "one or --dense mean"
        raise CheckpointError(f"{src}: has {there} beside the experts; give --dense {right}")
    ffns, words = shared_experts, "the shared expert"
    if how == "one":
        loads = read_load(src, load, source.num_experts, layers)
        choice = {layer: most_loaded(each, 1) for layer, each in loads.items()}
        ffns, words = Selection(source, choice).experts(range(1))[0], "the most loaded expert"
    if how == "mean":
        ffns, words = _mean_experts(source, _known_load(source, src, load)), "mean of the experts"
    model = {n: each for n, each in shared[MODEL].items() if not n.startswith(tuple(layers))}
    model |= {_dense_name(name): value for name, value in ffns.items()}
    _check_ffns(model, src)
    state = _as_stock({**shared, MODEL: model}, src)
    entry = Growth("shrink", words, source.num_experts, 0, updates_done(shared))
    return Change(source, state, lambda wanted: ({}, {}), entry, {}).write(dst, None, force=force)


def _known_load(source: SetReader, src: str, load: str | None) -> Load:
    """Read the load; if no file is named and none is beside the set, take an even one."""
    layers = layers_of(source)
    try:
        return read_load(src, load, source.num_experts, layers)
    except CheckpointError as error:
        if load is not None:
            raise
        logger.warning("%s; all experts count equally", error)
        return even_load(source.num_experts, layers)


def _mean_experts(source: SetReader, load: Load) -> dict[str, Tensor]:
    """Return one expert per layer, the mean weighted by load; in fp64, rounded once."""
    sums: dict[str, Tensor] = {}
    dtypes = {}
    for number in range(source.num_experts):  # in the order of the files: one is open at a time
        tensors = source.experts(range(number, number + 1), with_optimizer=False)[0]
        for name, value in tensors.items():
            loads = load[split_key(name)[0].removesuffix("experts.")]
            weight = loads[number] / sum(loads) if sum(loads) else 1 / len(loads)
            sums[name] = sums.get(name, 0) + weight * value.double()
            dtypes[name] = value.dtype
    return {name: total.to(dtypes[name]) for name, total in sums.items()}


def _dense_name(name: str) -> str:
    """Map the name of an expert's or shared expert's parameter to that of an FFN.

    ``X.moe_layer.experts.0.fc1.weight`` -> ``X.fc1.weight``
    """
    parsed = split_key(name)
    prefix, rest = (parsed[0], parsed[2][1:]) if parsed else name.split("shared_expert.")
    return prefix.removesuffix("experts.").removesuffix("moe_layer.") + rest


def _widths(model: Mapping[str, Any], side: str) -> dict[int, str]:
    """Return hidden width -> name for the FFNs of encoder or decoder."""
    return {
        value.shape[0]: name
        for name, value in model.items()
        if f"{side}.layers." in name and name.endswith(".fc1.weight")
    }


def _check_ffns(model: Mapping[str, Any], src: str) -> None:
    if gated := [name for name in model if ".fc_gate." in name]:
        raise CheckpointError(f"{src}: {gated[0]}: stock fairseq has no gated FFN")
    for side in ("encoder", "decoder"):
        widths = _widths(model, side)
        if len(widths) > 1:
            raise CheckpointError(
                f"{src}: FFNs of {' and '.join(map(str, sorted(widths)))} hidden units "
                f"({', '.join(widths.values())}), but a dense model has one width: experts must "
                "be as wide as the dense layers"
            )


def _as_stock(state: dict[str, Any], src: str) -> dict[str, Any]:
    """Return the state as stock fairseq writes it: its criterion, its model and options."""
    names = {ours: stock for stock, ours in CRITERIONS.items()}
    history = state.get("optimizer_history") or ()
    of_stock = [
        {
            **each,
            "criterion_name": names.get(each.get("criterion_name"), each.get("criterion_name")),
        }
        for each in history
    ]
    state = {key: value for key, value in state.items() if key not in (OPTIMIZER, METADATA)}
    state["optimizer_history"] = of_stock
    criterion = options_of(state, "criterion")
    if isinstance(state.get("cfg"), Mapping) and str(criterion.get("_name")).startswith("moe_"):
        changes = {name: None for name in criterion if "moe_" in name}
        changes["_name"] = criterion["_name"].removeprefix("moe_")
        state = with_options(state, changes, "criterion")
    state = with_options(state, _stock_options(options_of(state), state[MODEL], src))
    options = options_of(state)
    if "encoder_layers" in options and isinstance(state.get("cfg"), Mapping):
        state["cfg"] = {**state["cfg"], "model": Namespace(**options)}  # as a transformer's is
    return state


def _stock_options(options: Mapping[str, Any], model: Mapping[str, Any], src: str) -> dict:
    """Return changes to the model's options: stock's name, no experts, and every size."""
    for name in ("moe_cmr", "use_stable_embedding"):
        if options.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{src}: stock fairseq has no model with {flag}")
    changes: dict[str, Any] = {name: None for name in options if "moe_" in name}
    for name in ("_name", "arch"):
        if options.get(name):
            changes[name] = str(options[name]).partition("_moe")[0]
    for side in ("encoder", "decoder"):
        changes |= {f"{side}_ffn_embed_dim": width for width in _widths(model, side)}
    if "encoder_layers" in options:  # stock does not fill in sizes of a stored transformer
        dim = options.get("decoder_embed_dim") or options["encoder_embed_dim"]
        changes["decoder_embed_dim"] = dim
        for name in ("decoder_input_dim", "decoder_output_dim"):
            changes[name] = options.get(name) or dim
        if options.get("share_all_embeddings"):
            changes["share_decoder_input_output_embed"] = True
    return changes
