"""Sparse blocks of transformers that can be replaced, and their routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...moe import MoEConfig, MoELayer
from ...moe.torch_modes import hooks_of


def _always(gate: nn.Module) -> bool:
    return True


def _if_asked(gate: nn.Module) -> bool:
    return bool(gate.norm_topk_prob)


# Class of a sparse block -> whether its router divides a token's K weights by their sum. All these
# blocks take the softmax over all experts, choose the K best and have no shared expert. Add a class
# by SPARSE_BLOCKS["MySparseBlock"] = lambda gate: True.
SPARSE_BLOCKS: dict[str, Callable[[nn.Module], bool]] = {
    "FlexOlmoSparseMoeBlock": _if_asked,
    "MiniMaxSparseMoeBlock": _always,
    "MixtralSparseMoeBlock": _always,
    "OlmoeSparseMoeBlock": _if_asked,
    "Qwen3MoeSparseMoeBlock": _if_asked,
    "Qwen3VLMoeTextSparseMoeBlock": _always,
}

_PARAMS = {"gate.weight": 2, "experts.gate_up_proj": 3, "experts.down_proj": 3}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GATED = {"swiglu": nn.functional.silu, "geglu": nn.functional.gelu}


class SparseBlock(NamedTuple):
    """Block that can be replaced, with the options of its MoE layer.

    Attributes:
        name: name of the block in the model.
        module: the block.
        config: options of its routing.
        network: name of the network of its experts.
    """

    name: str
    module: nn.Module
    config: MoEConfig
    network: str

    @classmethod
    def of(cls, name: str, module: nn.Module, routing: dict[str, Any]) -> SparseBlock:
        """Read a block of the table; ``routing`` has more options of MoEConfig.

        Raises:
            ValueError: the block cannot be replaced; the message names it.
        """
        _check(name, module)
        gate, top_k = module.gate, module.gate.top_k
        normalized = SPARSE_BLOCKS[type(module).__name__](gate)
        if normalized and top_k == 1:
            raise ValueError(
                f"{name}: the weight of a token's one expert is normalised to 1, which teaches its "
                "router nothing; an MoE layer weights it by the gate's probability"
            )
        jitter = getattr(module, "jitter_noise", 0.0)
        if jitter and "input_jitter" not in routing:
            raise ValueError(
                f"{name}: jitter_noise={jitter} multiplies what experts see, too; give "
                f"input_jitter={jitter} for the router's input alone, or 0"
            )
        config = MoEConfig(
            num_experts=gate.weight.shape[0],
            top_k=top_k,
            unnormalized_weights=not normalized,
            **routing,
        )
        return cls(name, module, config, _network(name, module.experts.act_fn))


def find_sparse_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of the table in a model by name.

    Raises:
        ValueError: the model has no such block, or experts in another class, or is quantised.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", quantizer)
        raise ValueError(f"{type(model).__name__} is quantised ({method}): load it without")
    modules = list(model.named_modules(remove_duplicate=False))
    found = {name: each for name, each in modules if type(each).__name__ in SPARSE_BLOCKS}
    inside = tuple(f"{name}." for name in found)
    for name, module in modules:
        has_experts = isinstance(getattr(module, "experts", None), nn.Module)
        known = name in found or name.startswith(inside) or isinstance(module, MoELayer)
        if has_experts and not known:
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot be replaced: {_reason(module)}"
            )
    if not found or "" in found:
        raise ValueError(
            f"{type(model).__name__} has no sparse blocks inside; known are "
            f"{', '.join(SPARSE_BLOCKS)}"
        )
    if len(set(map(id, found.values()))) < len(found):
        raise ValueError(f"one sparse block stands at several places: {', '.join(found)}")
    return found


def _reason(block: nn.Module) -> str:
    """Return why a block with experts is not in the table."""
    shared = [name for name, _ in block.named_children() if "shared" in name]
    if shared:
        return f"it has shared experts beside the routed ones ({', '.join(shared)})"
    grouped = any(
        getattr(each, "n_group", None) or getattr(each, "num_group", None)
        for each in (block, *block.children())
    )
    tensors = (*block.named_parameters(), *block.named_buffers())
    if grouped or any("correction_bias" in name for name, _ in tensors):
        return "its router chooses by groups of experts, or by sigmoids with a bias"
    return "it is not in SPARSE_BLOCKS, the blocks with known routing"


def _check(name: str, block: nn.Module) -> None:
    """Raise ValueError for a block whose parameters differ from those in the table."""
    params = dict(block.named_parameters())
    shapes = {key: tuple(param.shape) for key, param in params.items()}
    where = f"{name} ({type(block).__name__})"
    if {key: param.dim() for key, param in params.items()} != _PARAMS:
        raise ValueError(
            f"{where} has {shapes}, not gate.weight [E, M], experts.gate_up_proj [E, 2F, M] and "
            "experts.down_proj [E, M, F], as blocks of transformers have since version 5"
        )
    num_experts, double, model_dim = shapes["experts.gate_up_proj"]
    wanted = [(num_experts, model_dim), (num_experts, model_dim, double // 2)]
    if [shapes["gate.weight"], shapes["experts.down_proj"]] != wanted:
        raise ValueError(f"{where}: shapes do not fit, {shapes}")
    for key, param in params.items():
        if param.is_meta:
            raise ValueError(f"{name}.{key} is on the meta device: load the model's weights first")
        if param.dtype not in _FLOATS:
            raise ValueError(f"{name}.{key} is quantised ({param.dtype}): load it without")
    dtypes = {params[key].dtype for key in ("experts.gate_up_proj", "experts.down_proj")}
    if len(dtypes) > 1:
        raise ValueError(f"{where} has experts of several dtypes, {dtypes}: convert them to one")
    if any(any(hooks_of(each)) for each in (block, block.experts)):
        raise ValueError(f"{where} has hooks, which an MoE layer does not take over: remove them")


def _network(name: str, activation: Callable[[Tensor], Tensor]) -> str:
    """Return the gated network with this activation, which is recognised by its values."""
    x = torch.linspace(-6, 6, 49)
    for network, known in _GATED.items():
        if torch.allclose(activation(x), known(x), rtol=1e-5, atol=1e-6):
            return network
    built_in = ", ".join(f"{each} ({known.__name__})" for each, known in _GATED.items())
    raise ValueError(f"{name}: no built-in experts have {activation}; there are {built_in}")
