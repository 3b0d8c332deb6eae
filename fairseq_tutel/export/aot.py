"""AOTInductor packages: a model compiled ahead of time, which a C++ program runs without Python.

A package is one file, ``NAME.pt2``: a shared library and the weights. It takes any number of tokens
and sentences, and is for one kind of device (and, on a CPU, for instruction sets like this one's).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..config import EXPERTS, ROUTERS
from ..moe import MoELayer
from .description import MoEDescription, describe_moe
from .errors import ExportError
from .names import is_no_weight, place_in_layer
from .source import ModelSource, layer_prefix
from .twin import InferenceModel, InferenceMoE

_MAX_TOKENS = 2**20


def export_aot(
    checkpoint: str | Path, path: str | Path, *, layer: int | None = None, device: str = "cpu"
) -> Path:
    """Compile the language model of a checkpoint: tokens int64 [B, L] -> logits [B, L, V].

    Args:
        checkpoint: a set or a merged file; it is only read.
        path: NAME.pt2, which must not exist.
        layer: number, from 0, of a layer whose experts are compiled alone: [T, M] -> [T, M].
        device: what it is compiled for, which must be here.

    Returns:
        ``path``.

    Raises:
        ExportError: the model cannot be exported, or nothing can be compiled here.
        CheckpointError: the checkpoint cannot be read.
    """
    path = _checked(path, device)
    source = ModelSource(checkpoint)
    if layer is not None:
        module: nn.Module = InferenceMoE(source.description.moe)
        module.load_state_dict(source.tensors(layer_prefix(source, layer)), assign=True)
        return _compile_layer(module, path, device)
    module = InferenceModel(source.description)
    module.load_state_dict(source.tensors(), assign=True)
    tokens = torch.full((2, 4), source.description.prompt, device=device)
    sizes = (
        torch.export.Dim("batch", max=_MAX_TOKENS),
        torch.export.Dim("length", max=source.description.max_positions),
    )
    facts = {"kind": "model", "vocab_size": str(source.description.vocab_size)}
    return _compile(module.to(device), tokens, dict(enumerate(sizes)), path, facts)


def export_layer(layer: MoELayer, path: str | Path, *, device: str = "cpu") -> Path:
    """Compile a layer of a program of your own: [T, M] -> [T, M], any T from 1 on.

    It has all experts, the dtype of the layer's weights, and drops nothing, as :func:`export_aot`.

    Raises:
        ExportError: a gate or experts of your own, or experts that are spread over ranks.
    """
    path = _checked(path, device)
    return _compile_layer(layer_twin(layer), path, device)


def layer_twin(layer: MoELayer) -> InferenceMoE:
    """A layer in evaluation, in core operators of torch, with copies of its weights."""
    moe = _describe(layer)
    state = {key: value for key, value in layer.state_dict().items() if not is_no_weight(key)}
    tensors: dict[str, torch.Tensor] = {}
    for key, values in state.items():
        place = place_in_layer(key, moe)
        if place is None:
            raise ExportError(f"{key} has no place in an exported layer")
        shape = moe.shapes()[place.name]
        target = tensors.setdefault(place.name, values.new_empty(shape))
        target.view(-1)[place.start : place.start + values.numel()] = values.reshape(-1)
    twin = InferenceMoE(moe)
    twin.load_state_dict(tensors, assign=True)
    return twin


def _describe(layer: MoELayer) -> MoEDescription:
    groups, experts, shared = layer.groups, layer.experts, layer.shared_expert
    if groups.ep_size * groups.num_slices > 1:
        raise ExportError(
            f"the layer's experts are spread over {groups.ep_size * groups.num_slices} ranks: save "
            "it, and load it in one process"
        )
    if type(layer.gate) is not ROUTERS.get(layer.config.router):
        raise ExportError(f"a gate of your own ({type(layer.gate).__name__}) cannot be exported")
    networks = [name for name in EXPERTS if type(experts) is EXPERTS.get(name)]
    if not networks:
        raise ExportError(
            f"experts that are no built-in stacked ones ({type(experts).__name__}) cannot be "
            "exported"
        )
    if shared is not None and experts.uses_activation and shared.activation != experts.activation:
        raise ExportError("a shared expert with another activation cannot be exported")
    return describe_moe(
        layer.config,
        model_dim=layer.model_dim,
        hidden_dim=experts.hidden_dim,
        network=networks[0],
        network_options=experts.options,
        activation=experts.activation if shared is None else shared.activation,
        shared_dim=0 if shared is None else shared.fc1.out_features,
    )


def _checked(path: str | Path, device: str) -> Path:
    path = Path(path)
    if path.suffix != ".pt2":
        raise ExportError(f"{path}: the name of a package ends in .pt2")
    if path.exists():
        raise ExportError(f"{path}: exists; remove it, or give another name")
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise ExportError(f"torch {torch.__version__} has no packages of AOTInductor; 2.6 has")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ExportError(f"--device {device}: there is no GPU here")
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        raise ExportError(f"a C++ compiler is needed, and {compiler} was not found (CXX=...)")
    return path


def _compile_layer(module: InferenceMoE, path: Path, device: str) -> Path:
    moe = module.router.moe
    x = torch.zeros(4, moe.model_dim, dtype=module.router.weight.dtype, device=device)
    dtype = str(x.dtype).removeprefix("torch.")
    facts = {"kind": "layer", "model_dim": str(moe.model_dim), "dtype": dtype}
    tokens = torch.export.Dim("tokens", max=_MAX_TOKENS)
    return _compile(module.to(device), x, {0: tokens}, path, facts)


def _compile(
    module: nn.Module, example: torch.Tensor, sizes: Mapping, path: Path, facts: Mapping[str, str]
) -> Path:
    """``facts``: what the package says of itself to a program, as texts."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    module.eval().requires_grad_(False)
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=(dict(sizes),))
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": dict(facts)},
        )
    return path
