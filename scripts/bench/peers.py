"""MoE layers of other libraries, imported from the folders where they are built.

No code of theirs is in this repository. Each function returns the layer as a function of tokens
[T, M]; layers draw weights of their own.
"""

import dataclasses
import importlib
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from dense_reference import DenseMoE, gating
from layers import DTYPES, LayerShape, make_layer
from program import Options
from torch import Tensor, nn

from fairseq_tutel.moe import MoELayer, hold_experts

FOLDERS: Options = {
    "tutel": (Path, "repository of Tutel, built in place"),
    "meta": (Path, "fairseq/modules/moe of fairseq's branch moe"),
}
EVALUATED = ("layer", "int8", "dense", "meta", "tutel", "flop-matched")
_META_FRACTION = 0.25  # rows of an expert over tokens: Meta's default for evaluation
_SEQUENCE = 128  # tokens of one sequence, for layers that take batches
_MASK_NUMEL = 2**28  # a layer with larger dense masks is not run: seconds, and 1 GiB each


class Peer(NamedTuple):
    """A layer: tokens [T, M] -> output, or output and balance loss; its parameters."""

    run: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]
    module: nn.Module


@contextmanager
def importable(folder: Path | None, **stand_ins: types.ModuleType | None) -> Iterator[None]:
    """Make modules of the folder importable; others get stand-ins (None: absent)."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    saved = {name: sys.modules.get(name) for name in stand_ins}
    if folder is not None:
        sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def tutel_layer(folder: Path, shape: LayerShape, capacity_factor: float) -> Peer:
    """Build Tutel's layer; a factor of 0 means as many rows as the fullest expert needs."""
    with importable(folder):
        moe = importlib.import_module("tutel.moe")
    gate = {"type": "top", "k": shape.top_k, "capacity_factor": capacity_factor, "fp32_gate": True}
    experts = {
        "type": "ffn",
        "num_experts_per_device": shape.experts,
        "hidden_size_per_expert": shape.hidden_dim,
        "activation_fn": nn.functional.gelu,
    }
    layer = moe.moe_layer(gate_type=gate, experts=experts, model_dim=shape.model_dim)

    def run(x):
        y = layer(x[None])
        return y[0], y.l_aux

    return Peer(run, layer)


def gated_width(shape: LayerShape) -> int:
    """Return F of a gated network with as many FLOPs: 2/3 of the shape's, divisible by 8."""
    return 8 * round(shape.hidden_dim / 12)


def mixtral_block(folder: Path, shape: LayerShape) -> Peer:
    """Build Hugging Face's Mixtral block: gated experts, no biases, capacity or balance loss."""
    audio = types.ModuleType("torchaudio")  # an installed one may not fit torch
    audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    with importable(folder, torchaudio=audio):
        mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=shape.model_dim,
        intermediate_size=gated_width(shape),
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block = mixtral.MixtralSparseMoeBlock(config)
    for param in block.parameters():
        nn.init.normal_(param, std=0.02)

    def run(x):
        y = block(x[None])
        return (y[0] if isinstance(y, tuple) else y)[0]

    return Peer(run, block)


def gated_layer(shape: LayerShape, device: torch.device, seed: int) -> MoELayer:
    """Build this layer as a Mixtral block is built."""
    network = {"expert_network": "swiglu", "expert_options": {"bias": False}}
    routing = {"capacity_factor": 0.0, "second_expert_policy": "all", "compute_aux": False}
    narrow = dataclasses.replace(shape, hidden_dim=gated_width(shape))
    return make_layer(narrow, device, seed, **network, **routing)


def dense_network(model_dim: int, hidden_dim: int) -> nn.Sequential:
    """Build two linear layers with a gelu between them."""
    return nn.Sequential(
        nn.Linear(model_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, model_dim)
    )


def meta_layer(folder: Path, shape: LayerShape, tutel: Path | None, evaluates=False) -> Peer:
    """Build the layer of fairseq's branch moe, with Tutel's dispatcher or with its own masks.

    On several ranks it spreads its experts over all of them.

    Args:
        folder: ``fairseq/modules/moe`` of the branch; only its layer and gates are imported.
        evaluates: in evaluation, at its default ``moe_eval_capacity_token_fraction``.

    Raises:
        ValueError: it has gates of one and of two experts per token only, or masks are too large.
    """
    if shape.top_k > 2:
        raise ValueError(f"it has no gate of {shape.top_k} experts per token")
    capacity = math.ceil(_META_FRACTION * shape.tokens) if evaluates else shape.capacity
    mask = shape.tokens * shape.experts * capacity
    if not tutel and mask > _MASK_NUMEL:
        raise ValueError(f"each of its masks has {mask:,} numbers")
    name = f"meta_moe_{'tutel' if tutel else 'einsum'}"
    fairseq, utils = types.ModuleType("fairseq"), types.ModuleType("fairseq.distributed_utils")
    fairseq.distributed_utils = utils
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if world_size > 1 else None
    utils.get_moe_group = utils.get_all2all_group = lambda experts: group
    utils.get_world_size = lambda group: world_size
    stand_ins = {"fairseq": fairseq, "fairseq.distributed_utils": utils}
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules.setdefault(name, package)
    if not tutel:
        stand_ins["tutel"] = None  # the branch takes Tutel's dispatcher wherever it finds it
    with importable(tutel, **stand_ins):
        moe_layer = importlib.import_module(f"{name}.moe_layer")
        gates = importlib.import_module(f"{name}.top{shape.top_k}gate")
    sizes = (shape.model_dim, shape.experts)
    if shape.top_k == 1:
        gate = gates.Top1Gate(*sizes, True, _META_FRACTION)
    else:
        gate = gates.Top2Gate(*sizes, True, "all", False, _META_FRACTION, False)
    batch = 1 if evaluates else shape.tokens // _SEQUENCE
    sizes = {"moe_expert_count": shape.experts, "batch_size": batch, "batch_size_valid": batch}
    experts = nn.ModuleList(
        dense_network(shape.model_dim, shape.hidden_dim) for _ in range(shape.experts // world_size)
    )
    layer = moe_layer.MOELayer(gate, experts, types.SimpleNamespace(dummy_a2a=True, **sizes))
    if world_size > 1:  # its wrapper times the exchange by events of a GPU
        layer.all_to_all_wrapper = lambda rows: moe_layer._AllToAll.apply(group, rows)
    if evaluates:
        layer.prepare_for_inference_()  # it fills up no batch
        layer.eval()

    def run(x):
        y, loss = layer(x.view(batch, -1, shape.model_dim))
        return y.view(x.shape), loss

    return Peer(run, layer)


def peers_of(
    shape: LayerShape, device: torch.device, tutel, meta, transformers
) -> tuple[dict, dict[str, str]]:
    """Build the layers of bench_peers.py that have a folder; name -> reason of the others.

    They draw their weights on the device.
    """
    with device:
        found, missing = _build_those_there(
            {
                "meta+tutel": (tutel and meta, lambda: meta_layer(meta, shape, tutel)),
                "meta": (meta, lambda: meta_layer(meta, shape, None)),
                "tutel": (tutel, lambda: tutel_layer(tutel, shape, shape.capacity_factor)),
                "tutel dropless": (tutel, lambda: tutel_layer(tutel, shape, 0.0)),
                "mixtral": (transformers, lambda: mixtral_block(transformers, shape)),
            }
        )
    for peer in found.values():
        peer.module.to(device, DTYPES[shape.dtype])
    return found, missing


def evaluated_layers(shape: LayerShape, layer, names, folders) -> tuple[dict, dict[str, str]]:
    """Build some of EVALUATED, [T, M] -> [T, M]; name -> reason of those missing.

    Meta's and the dense one have 0.25 T rows per expert; Tutel's, with capacity 0, has as many as
    the fullest expert needs.

    Args:
        folders: has those of FOLDERS as attributes.
    """

    def int8():
        other = make_layer(shape, torch.device("cpu")).eval()
        other.experts, other.gate = hold_experts(layer.experts, "int8"), layer.gate
        return other

    def dense():
        masks = DenseMoE(layer)

        def run(x_TM):
            capacity = math.ceil(_META_FRACTION * len(x_TM))
            combine_TEC, *_ = gating(layer.gate.logits(x_TM), layer.config.top_k, capacity)
            return masks.products(x_TM, combine_TEC)

        return run

    def peer(made):
        made.module.eval()
        return lambda x: made.run(x)[0]

    tutel, meta, wide = folders.tutel, folders.meta, shape.top_k * shape.hidden_dim
    builders = {
        "layer": (True, lambda: layer),
        "int8": (True, int8),
        "dense": (True, dense),
        "meta": (meta, lambda: peer(meta_layer(meta, shape, None, evaluates=True))),
        "tutel": (tutel, lambda: peer(tutel_layer(tutel, shape, 0.0))),
        "flop-matched": (True, lambda: dense_network(shape.model_dim, wide).eval()),
    }
    return _build_those_there({name: builders[name] for name in names})


def _build_those_there(builders: dict[str, tuple]) -> tuple[dict, dict[str, str]]:
    """Build from name -> (folder, function); name -> reason of those that cannot be built."""
    found, missing = {}, {}
    for name, (folder, build) in builders.items():
        try:
            if not folder:
                raise ValueError("no folder was given")
            found[name] = build()
        except ValueError as error:
            missing[name] = str(error)
    return found, missing
