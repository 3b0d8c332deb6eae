"""Sparse blocks of transformers that can be replaced, and their descriptions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...backends._torch_private import hooks_of
from ...moe import MoEConfig, MoELayer
from .experts import Projections

# Class of a sparse block whose routing cannot be recognised -> whether its router divides a token's
# K weights by their sum. The block has `experts` and a router `gate`, which takes the softmax over
# all experts and chooses the K best. A class of your own:
# SPARSE_BLOCKS["MySparseBlock"] = lambda gate: True.
SPARSE_BLOCKS: dict[str, Callable[[nn.Module], bool]] = {}

# Class of a block that is refused -> reason.
REFUSED: dict[str, str] = {
    "DbrxFFN": "its experts' matrices are stacked in two dimensions",
    "DogeCDMoE": "its experts are single hidden units, found by product keys",
    "Ernie4_5_VLMoeMoeBlock": (
        "it calls experts for images only if a batch has some, and ranks would wait for each other"
    ),
    "JetMoeMoE": "its experts have one bias in common, and its attention has experts, too",
    "Llama4TextMoe": "the router's weights multiply what experts see, not what they return",
    "LongcatFlashMoE": "some of its experts return the token itself",
    "MuseSparkMoE": "a norm follows each expert",
    "NllbMoeSparseMLP": "its experts are modules, and its router drops by rules of its own",
    "SwitchTransformersSparseMLP": "its experts are modules, and its router drops tokens",
    "VitPoseBackboneMoeMLP": "a data set, not a router, chooses the expert",
}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Description(NamedTuple):
    """Parts of a sparse block by name, and how its router chooses.

    A block that computes more than its parts say (a norm of the sum, latent projections), or whose
    router chooses by rules of its own, has no ``router`` here: then the layer takes the place of
    its experts alone, and the block goes on routing. Parts that it lacks are "".
    """

    router: str = ""
    routing: Mapping[str, Any] = {}  # options with which the layer routes the router's logits
    bias: str = ""  # path of the correction bias, which becomes the layer's load bias
    bias_given: bool = False  # the block gives the bias to its router
    sequences: bool = False  # the router takes [B, T, M], not [T, M]
    shared: str = ""  # the expert of all tokens
    shared_gate: str = ""  # the gate of that expert, a linear map to one logit


class SparseBlock(NamedTuple):
    """Module that an MoE layer replaces."""

    name: str  # in the model
    module: nn.Module  # a sparse block, or its experts
    experts: nn.Module  # holds the experts' parameters
    description: Description  # of the block; without a router if ``module`` is the experts
    config: MoEConfig  # options of routing of the layer


def declared(name: str, block: nn.Module, allowed: Mapping[str, Any]) -> Description:
    """Return the description of a block of SPARSE_BLOCKS, or raise ValueError.

    ``allowed`` are the caller's options of routing.
    """
    normalized = SPARSE_BLOCKS[type(block).__name__](block.gate)
    if normalized and block.gate.top_k == 1:
        raise ValueError(
            f"{name}: the weight of a token's one expert is normalised to 1, which teaches its "
            "router nothing; an MoE layer weights it by the gate's probability"
        )
    jitter = getattr(block, "jitter_noise", 0.0)
    if jitter and "input_jitter" not in allowed:
        raise ValueError(
            f"{name}: jitter_noise={jitter} multiplies what experts see, too; give "
            f"input_jitter={jitter} for the router's input alone, or 0"
        )
    routing = {"top_k": block.gate.top_k, "unnormalized_weights": not normalized}
    return Description(router="gate", routing=routing)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the sparse blocks of a model by name: modules with experts, as transformers has them.

    Raise ValueError if the model has none, or one that is refused, or is quantised.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", quantizer)
        raise ValueError(f"{type(model).__name__} is quantised ({method}): load it without")
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind, experts = type(module).__name__, getattr(module, "experts", None)
        if kind in REFUSED:
            raise ValueError(f"{name} ({kind}) cannot be replaced: {REFUSED[kind]}")
        if isinstance(module, MoELayer) or not isinstance(experts, nn.Module):
            continue
        if not isinstance(experts, MoELayer):
            found[name] = module
    if not found or "" in found:
        raise ValueError(
            f"{type(model).__name__} has no sparse blocks inside: no module with experts"
        )
    _refuse_shared_experts(model, found)
    return found


def _refuse_shared_experts(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if experts' weights are used elsewhere: a layer takes them for itself."""
    used = dict(model.named_parameters(remove_duplicate=False))
    for name, block in found.items():
        mine = set(map(id, block.experts.parameters()))
        others = (key for key in used if not key.startswith(f"{name}."))
        for other in others:
            if id(used[other]) in mine:
                raise ValueError(f"{name}.experts shares weights with {other}: they are tied")


def check_block(name: str, block: nn.Module) -> Projections:
    """Return its experts' matrices; raise ValueError if its parameters are no sparse block's."""
    where, experts = f"{name} ({type(block).__name__})", block.experts
    if hasattr(experts, "base_layer"):
        raise ValueError(f"{where} has adapters of peft on its experts: call replace_moe first")
    for module, prefix in ((experts, f"{name}.experts"), (block, name)):
        for key, param in module.named_parameters():
            if param.is_meta:
                raise ValueError(
                    f"{prefix}.{key} is on the meta device: load the model's weights first"
                )
            if param.dtype not in _FLOATS:
                raise ValueError(f"{prefix}.{key} is quantised ({param.dtype}): load it without")
    projections = Projections.of(where, experts)
    dtypes = {param.dtype for param in experts.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"{where} has experts of several dtypes, {dtypes}: convert them to one")
    if any(any(hooks_of(each)) for each in (block, experts)):
        raise ValueError(f"{where} has hooks, which an MoE layer does not take over: remove them")
    return projections
