"""Reads checkpoints of Microsoft's Swin-MoE and writes one file that train.py --init starts from.

    python scripts/examples/swin_moe/convert.py FOLDER/NAME.pth runs/published.pt

NAME.pth stands for the files of a run: NAME.pth.global, or NAME.pth.rank0, .rank1, ... (with
NAME.pth.master, where the weights that are not of experts are in that). Each rank's file holds the
experts of that rank or, where there are fewer experts than ranks, a slice of one: of R ranks to an
expert, rank r has slice r % R of expert r // R. The sizes of the model are read from the weights;
how tokens are routed from the configuration, if a file has it, else it is that of the published
models. Files are read by torch's restricted unpickler.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from glob import escape, glob
from pathlib import Path
from typing import Any

import torch
from model import MOE, SwinConfig, SwinMoE, WindowAttention
from torch import Tensor

from fairseq_tutel.checkpoint import CheckpointError, load_file

State = dict[str, Tensor]

_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.(.*)")
_MOE = re.compile(r"(layers\.\d+\.blocks\.\d+\.mlp)\._moe_layer\.")
_GATE_WEIGHT = re.compile(r"\.gate\.(wg\.weight|expert_dirs)$")  # [E, ...]
# what a model computes anew from its sizes; compared, where it is there
_COMPUTED = re.compile(r"(relative_position_index|relative_coords_table|attn_mask)$")
_GATE = {
    "gates.0.wg.weight": "gate.wg.weight",
    "gates.0.cosine_projector.weight": "gate.proj.weight",
    "gates.0.cosine_projector.bias": "gate.proj.bias",
    "gates.0.sim_matrix": "gate.expert_dirs",
    "gates.0.temperature": "gate.log_scale",
}
_EXPERT = {
    "fc1_w": "fc1.weight",  # [e, F, M]
    "fc1_bias": "fc1.bias",  # [e, F]
    "fc2_w": "fc2.weight",  # [e, F, M], and [M, F] of each expert here
    "fc2_bias": "fc2.bias",  # [e, M]
}


class CfgNode:
    """Stands for the class of a configuration in a file, a dict of yacs: a plain one is made."""

    def __new__(cls):
        return OrderedDict()


CfgNode.__module__ = "yacs.config"


def read(path: str, image: int = 192) -> tuple[SwinConfig, State]:
    """The files of one run; in a process alone, without ranks.

    Args:
        path: of NAME.pth.
        image: side of the images, where the files do not say it.

    Returns:
        Sizes of the model, and its full state dict: all experts by their numbers.

    Raises:
        CheckpointError: a file is missing, cannot be read or is of another model; names it.
    """
    shared, ranks, settings = _read_files(path)
    state = {name: value for name, value in shared.items() if not _MOE.match(name)}
    computed = {name: state.pop(name) for name in list(state) if _COMPUTED.search(name)}
    for layer in sorted({match[1] for name in shared if (match := _MOE.match(name))}):
        prefix = f"{layer}._moe_layer."
        for theirs, ours in _GATE.items():
            if (value := shared.get(prefix + theirs)) is not None:
                value = value.t().contiguous() if theirs.endswith("sim_matrix") else value
                state[f"{layer}.{ours}"] = value
        gates = [v for k, v in state.items() if k.startswith(layer) and _GATE_WEIGHT.search(k)]
        if len(gates) != 1:
            raise CheckpointError(f"{path}: {layer} has no gate of a kind that is known")
        experts = [_tensors(each, prefix) for each in ranks]
        state |= _join_experts(path, layer, experts, len(gates[0]))
    config = _config(path, state, computed, settings, image)
    _check(path, config, state, computed)
    return config, state


def _read_files(path: str) -> tuple[State, list[State], Mapping[str, Any]]:
    """(weights of rank 0, each rank's weights, the configuration or {})."""
    found = [(re.search(r"\.rank(\d+)$", name), name) for name in glob(f"{escape(path)}.rank*")]
    names = {int(match[1]): name for match, name in found if match}
    if not names and Path(f"{path}.global").exists():
        names = {0: f"{path}.global"}
    if sorted(names) != list(range(len(names))) or not names:
        raise CheckpointError(f"{path}: no {path}.global, and of its rank files {sorted(names)}")
    files = [_load(names[number]) for number in range(len(names))]
    ranks = [file["model"] for file in files]
    if Path(f"{path}.master").exists():
        # tensors of experts that are not trained are in it, too: they are alike on all ranks
        master = _load(f"{path}.master")["model"]
        ranks = [{**master, **weights} for weights in ranks]
    _compare(path, ranks)
    return ranks[0], ranks, files[0].get("config", {})


def _load(path: str) -> dict[str, Any]:
    with torch.serialization.safe_globals([CfgNode]):
        state = load_file(path)
    weights = state.get("model")
    if not isinstance(weights, Mapping) or not all(map(torch.is_tensor, weights.values())):
        raise CheckpointError(f"{path}: holds no model's weights")
    return state


def _compare(path: str, ranks: list[State]) -> None:
    """Refuse files of several models; say where the ranks have not the same shared weights.

    They may differ a little: gradients were clipped by a norm of each rank's own experts.
    """
    largest, where = 0.0, ""
    for number, weights in enumerate(ranks):
        shapes = [
            {name: value.shape for name, value in each.items()} for each in (weights, ranks[0])
        ]
        if shapes[0] != shapes[1]:
            names = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
            raise CheckpointError(f"{path}: {names[0]} of ranks 0 and {number} is not of one model")
        for name in weights:
            if ".experts." not in name:
                difference = float((weights[name].double() - ranks[0][name].double()).abs().max())
                if difference > largest:
                    largest, where = difference, f"{name} of rank {number}"
    if where:
        warnings.warn(
            f"{path}: {where} differs from rank 0's by {largest:.2g}; rank 0's weights are taken",
            stacklevel=2,
        )


def _tensors(weights: State, prefix: str) -> State:
    """A rank's tensors of one layer's experts: [experts or 1 slice, ...] by Tutel's short names."""
    start = f"{prefix}experts.batched_"
    return {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}


def _join_experts(path: str, layer: str, ranks: list[State], num_experts: int) -> State:
    """The experts of a layer, whole, as this package names them."""
    slices, rest = divmod(len(ranks), num_experts)
    if rest and num_experts % len(ranks):
        raise CheckpointError(f"{path}: {layer} has {num_experts} experts, on {len(ranks)} ranks")
    joined: State = {}
    for short, name in _EXPERT.items():
        if missing := [number for number, each in enumerate(ranks) if short not in each]:
            raise CheckpointError(f"{path}.rank{missing[0]}: {layer} has no batched_{short}")
        parts = [each[short] for each in ranks]
        if short.endswith("bias"):
            parts = [part.flatten(1) for part in parts]  # older files have [e, 1, F]
        if slices > 1:  # each part is [1, F / slices, ...]
            groups = [parts[first : first + slices] for first in range(0, len(parts), slices)]
            parts = [torch.cat(group, 1) for group in groups]
        whole = torch.cat(parts)
        if short == "fc2_bias":  # of a width that does not divide, the last slice is padded
            whole = whole[:, : ranks[0]["fc2_w"].shape[-1]]
        elif short == "fc2_w":
            whole = whole.transpose(1, 2)
        if len(whole) != num_experts:
            raise CheckpointError(
                f"{path}: {layer} has {len(whole)} experts in files of {len(ranks)} ranks, "
                f"and a gate for {num_experts}"
            )
        joined |= {f"{layer}.experts.{e}.{name}": each.clone() for e, each in enumerate(whole)}
    return joined


def _config(path: str, state: State, computed: State, settings, image: int) -> SwinConfig:
    """Sizes from names and shapes, options of routing from the configuration."""
    blocks = [match for name in state if (match := _BLOCK.match(name))]
    if not blocks or "head.weight" not in state or "patch_embed.proj.weight" not in state:
        raise CheckpointError(f"{path}: is not of Swin-MoE, its first names are {list(state)[:3]}")
    dim, channels, patch, _ = state["patch_embed.proj.weight"].shape
    depths = [0] * (1 + max(int(match[1]) for match in blocks))
    heads, sparse = depths.copy(), [set() for _ in depths]
    for match in blocks:
        stage, block = int(match[1]), int(match[2])
        depths[stage] = max(depths[stage], block + 1)
        if match[3] == "attn.cpb_mlp.2.weight":
            heads[stage] = len(state[match[0]])
        if match[3].startswith("mlp.experts."):
            sparse[stage].add(block)
    # a table is [1, 2w - 1, 2w - 1, 2], less in a stage that is smaller than a window
    tables = [v for k, v in computed.items() if k.endswith("relative_coords_table")]
    window = max(((table.shape[1] + 1) // 2 for table in tables), default=12)
    for name, mask in computed.items():
        if name.endswith("attn_mask"):  # [windows, N, N], of the blocks that roll
            side = math.isqrt(mask.shape[0]) * math.isqrt(mask.shape[1])
            image = side * patch << int(name.split(".")[1])
    model = settings.get("MODEL", {})
    options = model.get("SWIN_MOE", {})
    gates = [value for name, value in state.items() if _GATE_WEIGHT.search(name)]
    moe = {**MOE, **_routing(options)}
    if any("gate.proj" in name for name in state):
        proj_dim = gates[0].shape[1]
        moe |= {"router": "cosine", "router_options": {"proj_dim": proj_dim, "bias": True}}
    return SwinConfig(
        image=image, patch=patch, channels=channels, classes=len(state["head.weight"]), dim=dim,
        depths=tuple(depths), heads=tuple(heads), window=window,
        moe_blocks=tuple(tuple(sorted(each)) for each in sparse),
        num_experts=len(gates[0]) if gates else 0,
        drop_path=model.get("DROP_PATH_RATE", 0.2), moe_dropout=options.get("MOE_DROP", 0.1),
        init_std=options.get("INIT_STD", 0.005), moe=moe,
    )  # fmt: skip


def _routing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the layer that the configuration of a run decides."""
    if not options:
        return {}
    top_k, capacity = options["TOP_VALUE"], options["CAPACITY_FACTOR"]
    routing = {
        "top_k": top_k,
        "capacity_factor": capacity,
        "eval_capacity_factor": capacity,
        "batch_prioritized": options["USE_BPR"],
        "gate_noise": options["GATE_NOISE"],
        "load_importance_loss": not options["IS_GSHARD_LOSS"],
    }
    if top_k > 1:
        normalized = options["NORMALIZE_GATE"]
        routing |= {"unnormalized_weights": not normalized, "normalize_before_dropping": normalized}
    return routing


def _check(path: str, config: SwinConfig, state: State, computed: State) -> None:
    """Names, shapes and tables are those of the model that the sizes describe."""
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in SwinMoE(config).state_dict().items()}
    for name in sorted(wanted.keys() | state.keys()):
        theirs = state[name].shape if name in state else None
        if theirs != wanted.get(name):
            here, there = (
                "nothing" if shape is None else list(shape) for shape in (wanted.get(name), theirs)
            )
            raise CheckpointError(f"{path}: {name} is {there}, and {here} in a model of this size")
    for name, value in computed.items():
        _, stage, _, block, *_, kind = name.split(".")
        resolution = config.image // config.patch >> int(stage)
        window = min(config.window, resolution)
        shift = window // 2 if int(block) % 2 and window < resolution else 0
        attn = WindowAttention(1, 1, window, shift, resolution)
        mine = {"attn_mask": attn.mask, "relative_position_index": attn.index}
        mine = mine.get(kind, attn.coordinates)
        if mine is None or mine.numel() != value.numel():
            same = False
        else:
            same = torch.allclose(value.float().flatten(), mine.float().flatten(), atol=1e-5)
        if not same:
            raise CheckpointError(f"{path}: {name} is not that of windows of {window} patches")


def main(argv=None) -> int:
    """Exit code 1 for files that cannot be converted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="NAME.pth, of NAME.pth.rank0 and so on")
    parser.add_argument("target", help="the file to write")
    parser.add_argument("--image", type=int, default=192, help="side, if the files do not say it")
    options = parser.parse_args(argv)
    try:
        config, state = read(options.source, options.image)
    except CheckpointError as error:
        sys.stderr.write(f"convert.py: error: {error}\n")
        return 1
    Path(options.target).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"config": asdict(config), "model": state}, options.target)
    count = sum(value.numel() for value in state.values()) / 1e6
    print(f"{count:.2f}M parameters, {config.num_experts} experts: {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
