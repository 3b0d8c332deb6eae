"""A dense model of stock fairseq, made of a set: one FFN replaces the experts of a layer."""

import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...config.options import as_flag
from ..layout import CheckpointError, split_key
from ..reader import SetReader
from ..state import MODEL, options_of, with_options
from .change import check_ffn, open_sparse, write_change
from .selection import Load, even_load, layer_of, most_loaded, read_load
from .upcycle import CRITERIONS, with_criterions

_FFN = re.compile(r"((?:.*\.)?(encoder|decoder)\.layers\.\d+\.)(fc[12]\.(?:weight|bias))")
logger = logging.getLogger(__name__)

# what becomes the FFN of a layer
DENSE = {
    "one": "the most loaded expert",
    "mean": "mean of the experts",
    "shared": "the shared expert",
}


def to_dense(
    src: str, dst: str, how: str = "mean", *, load: str | None = None, force: bool = False
) -> str:
    """Write a dense model for stock fairseq, one file without optimizer state.

    Args:
        src, dst, load, force: see :func:`.grow.grow`, also for errors.
        how: FFN of a layer: ``one``: its most loaded expert; ``mean``: the mean of all experts,
            weighted by load; ``shared``: the shared expert.
    """
    source = open_sparse(src, dst, force)
    shared = source.shared_state(with_optimizer=False)
    ffns = {name: each for name, each in shared[MODEL].items() if "shared_expert." in name}
    if bool(ffns) != (how == "shared"):
        there = "a shared expert" if ffns else "no shared expert"
        right = "shared" if ffns else "one or --dense mean"
        raise CheckpointError(f"{src}: has {there} beside the experts; give --dense {right}")
    if how != "shared":
        ffns = _mean_experts(source, _weights(source, how, load))
    if gated := [name for name in ffns if ".fc_gate." in name or name.endswith(".gate.weight")]:
        raise CheckpointError(f"{src}: {gated[0]}: stock fairseq has no gated FFN")
    layers = tuple({layer_of(name) for name in ffns})
    model = {name: each for name, each in shared[MODEL].items() if not name.startswith(layers)}
    model |= {_dense_name(name): value for name, value in ffns.items()}
    state = _as_stock({**shared, MODEL: model}, src)
    change = ("shrink", DENSE[how], 0)
    return write_change(dst, source, state, lambda _: ({}, {}), change, ranks=None, force=force)


def _weights(source: SetReader, how: str, file: str | None) -> Load:
    """Return each expert's weight in its layer's FFN: its share of the load; equal if unknown."""
    try:
        loads = read_load(source, file)
    except CheckpointError as error:
        if file is not None or how == "one":
            raise
        logger.warning("%s; all experts count equally", error)
        loads = even_load(source)
    weights = {}
    for layer, load in loads.items():
        if how == "one":
            best = most_loaded(load, 1)[0]
            weights[layer] = [float(expert == best) for expert in range(len(load))]
        else:
            weights[layer] = [each / sum(load) if sum(load) else 1 / len(load) for each in load]
    return weights


def _mean_experts(source: SetReader, weights: Load) -> dict[str, Tensor]:
    """Return one expert per layer, the weighted mean; in fp64, rounded once."""
    sums: dict[str, Tensor] = {}
    dtypes = {}
    for number in range(source.num_experts):  # in the order of the files: one is open at a time
        if not any(each[number] for each in weights.values()):
            continue
        tensors, _ = source.experts(range(number, number + 1), with_optimizer=False)
        for name, value in tensors.items():
            if weight := weights[layer_of(name)][number]:
                part = weight * value.double()
                sums[name] = sums[name] + part if name in sums else part
                dtypes[name] = value.dtype
    return {name: total.to(dtypes[name]) for name, total in sums.items()}


def _dense_name(name: str) -> str:
    """Return the FFN's name: ``X.moe_layer.experts.0.fc1.weight`` -> ``X.fc1.weight``."""
    parsed = split_key(name)
    rest = parsed[2][1:] if parsed else name.partition("shared_expert.")[2]
    return layer_of(name).removesuffix("moe_layer.") + rest


def _widths(model: Mapping[str, Any], src: str) -> dict[str, int]:
    """Return {option: FFN width} by stack; CheckpointError for FFNs that stock fairseq lacks."""
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, value in model.items():
        if layer := _FFN.fullmatch(name):
            found.setdefault((layer[1], layer[2]), {})[layer[3]] = value
    for (prefix, _), ffn in found.items():
        check_ffn(ffn, f"{src}: {prefix}")
    options = {}
    for side in ("encoder", "decoder"):
        layers = {prefix: ffn for (prefix, of), ffn in found.items() if of == side}
        widths = {len(ffn["fc1.weight"]): f"{name}fc1.weight" for name, ffn in layers.items()}
        if len(widths) > 1:
            raise CheckpointError(
                f"{src}: FFNs of {' and '.join(map(str, sorted(widths)))} hidden units "
                f"({', '.join(widths.values())}), but a dense model has one width: experts must "
                "be as wide as the dense layers"
            )
        options |= {f"{side}_ffn_embed_dim": width for width in widths}
    return options


def _as_stock(state: dict[str, Any], src: str) -> dict[str, Any]:
    """Return the state as stock fairseq writes it: its criterion, its model and options."""
    state = with_criterions(state, {ours: stock for stock, ours in CRITERIONS.items()})
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


def _stock_options(
    options: Mapping[str, Any], model: Mapping[str, Any], src: str
) -> dict[str, Any]:
    """Return changes to the model's options: stock's name, no experts, and every size."""
    for name in ("moe_cmr", "use_stable_embedding"):
        if options.get(name):
            raise CheckpointError(f"{src}: stock fairseq has no model with {as_flag(name)}")
    changes: dict[str, Any] = {name: None for name in options if "moe_" in name}
    for name in ("_name", "arch"):
        if options.get(name):
            changes[name] = str(options[name]).partition("_moe")[0]
    changes |= _widths(model, src)
    if "encoder_layers" in options:  # stock does not fill in sizes of a stored transformer
        dim = options.get("decoder_embed_dim") or options["encoder_embed_dim"]
        changes["decoder_embed_dim"] = dim
        for name in ("decoder_input_dim", "decoder_output_dim"):
            changes[name] = options.get(name) or dim
        if options.get("share_all_embeddings"):
            changes["share_decoder_input_output_embed"] = True
    return changes
