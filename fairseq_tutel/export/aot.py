"""AOTInductor packages: models compiled ahead of time, which a C++ program runs without Python.

A package is one file, ``NAME.pt2``, for any number of sentences and tokens. It runs on one kind of
device and, on a CPU, needs the instruction sets of the machine that compiled it.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ..checkpoint.folders import is_no_weight, layer_tensors
from ..config import EXPERTS, ROUTERS
from ..moe import MoELayer
from .description import LayerConfig, describe_layer
from .errors import ExportError
from .huggingface_files.layers_fairseq_moe import FairseqMoEBlock
from .source import ModelSource
from .twin import InferenceModel, inference_layer

Module = TypeVar("Module", bound=nn.Module)

_MAX_TOKENS = 2**20


def export_aot(
    checkpoint: str | Path, path: str | Path, *, layer: int | None = None, device: str = "cpu"
) -> Path:
    """Compile the language model of a checkpoint: tokens int64 [B, L] -> logits [B, L, V].

    Args:
        checkpoint: a set or a merged file; CheckpointError if it cannot be read.
        path: NAME.pt2, which must not exist; it is returned.
        layer: compile the router and experts of this layer alone, counted from 0: [T, M] ->
            [T, M] (default None: the model).
        device: "cpu" or "cuda", which this machine must have (default "cpu").

    Raises:
        ExportError: the model cannot be exported, or this machine cannot compile it.
    """
    path = _checked(path, device)
    source = ModelSource(checkpoint, ["transformer_lm_gpt_moe"])
    config = source.config
    if layer is not None:
        names = source.names_in_layer(layer)
        tensors = {names[name]: tensor for name, tensor in source.tensors(names).items()}
        return _compile_layer(_with(inference_layer(config), tensors), path, device)
    module = _with(InferenceModel(config), source.tensors(source.shapes))
    tokens = torch.full((2, 4), source.options.prompt, device=device)
    sizes = (
        torch.export.Dim("batch", max=_MAX_TOKENS),
        torch.export.Dim("length", max=config.max_position_embeddings),
    )
    facts = {"kind": "model", "vocab_size": str(config.vocab_size)}
    return _compile(module.to(device), tokens, dict(enumerate(sizes)), path, facts)


def export_layer(layer: MoELayer, path: str | Path, *, device: str = "cpu") -> Path:
    """Compile one layer: [T, M] -> [T, M] for any T, in the dtype of the layer's weights.

    ``path`` and ``device`` are those of :func:`export_aot`. The package drops nothing. ExportError
    is raised if the layer has a gate or experts of your own, or experts on other ranks.
    """
    path = _checked(path, device)
    return _compile_layer(layer_twin(layer), path, device)


def layer_twin(layer: MoELayer) -> FairseqMoEBlock:
    """Return a layer in evaluation, in core operators of torch, with copies of its weights."""
    config = _describe(layer)
    twin, known = inference_layer(config), layer_tensors(config)
    shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    for key, values in layer.state_dict().items():
        if is_no_weight(key):
            continue
        if key not in known:
            raise ExportError(f"{key} has no place in an exported layer")
        name, start = known[key].place
        target = tensors.setdefault(name, values.new_empty(shapes[name]))
        target.view(-1)[start : start + values.numel()] = values.reshape(-1)
    return _with(twin, tensors)


def _with(module: Module, tensors: Mapping[str, torch.Tensor]) -> Module:
    """Return the module with these tensors in place of those on the meta device."""
    module.load_state_dict(tensors, assign=True)
    return module


def _describe(layer: MoELayer) -> LayerConfig:
    groups, experts, shared = layer.groups, layer.experts, layer.shared_expert
    if (spread := groups.ep_size * groups.num_slices) > 1:
        raise ExportError(f"experts are spread over {spread} ranks: load them in one process")
    if type(layer.gate) is not ROUTERS.get(layer.config.router):
        raise ExportError(f"a gate of your own ({type(layer.gate).__name__}) cannot be exported")
    networks = [name for name in EXPERTS if type(experts) is EXPERTS.get(name)]
    if not networks:
        kind = type(experts).__name__
        raise ExportError(f"experts that are no built-in stacked ones ({kind}) cannot be exported")
    if shared is not None and experts.uses_activation and shared.activation != experts.activation:
        raise ExportError("a shared expert with another activation cannot be exported")
    return describe_layer(
        layer.config,
        model_dim=layer.model_dim,
        hidden_dim=experts.hidden_dim,
        network=networks[0],
        network_options=experts.options,
        activation=experts.activation if shared is None else shared.activation,
        shared_dim=0 if shared is None else shared.fc1.out_features,
        shared_gate=shared is not None and shared.gate is not None,
    )


def _checked(path: str | Path, device: str) -> Path:
    path = Path(path)
    if path.suffix != ".pt2":
        raise ExportError(f"{path}: the name of a package must end in .pt2")
    if path.exists():
        raise ExportError(f"{path}: exists; remove it or give another name")
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise ExportError(f"torch {torch.__version__} cannot write packages; use 2.6 or newer")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ExportError(f"--device {device}: this machine has no GPU")
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        raise ExportError(f"C++ compiler {compiler} not found; install it or set CXX")
    return path


def _compile_layer(module: FairseqMoEBlock, path: Path, device: str) -> Path:
    weight = module.router.weight
    x = torch.zeros(4, weight.shape[1], dtype=weight.dtype, device=device)
    dtype = str(x.dtype).removeprefix("torch.")
    facts = {"kind": "layer", "model_dim": str(x.shape[1]), "dtype": dtype}
    tokens = torch.export.Dim("tokens", max=_MAX_TOKENS)
    return _compile(module.to(device), x, {0: tokens}, path, facts)


def _compile(
    module: nn.Module, example: torch.Tensor, sizes: Mapping, path: Path, facts: Mapping[str, str]
) -> Path:
    """Compile for any ``sizes`` of the input; ``facts`` become the package's metadata."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    module.eval().requires_grad_(False)
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=(dict(sizes),))
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": dict(facts)}
        )
    return path
