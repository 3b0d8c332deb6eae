"""Replacement of sparse blocks by MoE layers with the same weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...distributed import ExpertParallelGroups, build_groups
from ...moe import MoEConfig, MoELayer
from .blocks import SPARSE_BLOCKS, SparseBlock, check_block, declared, find_blocks
from .check import check_same
from .experts import Activation, KeptExperts, Projections
from .layers import ChoiceRouter, ChosenExperts, KeptRouter, shared_of, steer_router, tensor_at
from .recognize import recognize

# arguments of MoELayer that the block decides
_DECIDED = (
    "activation", "expert_fn", "expert_network", "expert_options", "experts", "gate", "group_score",
    "hidden_dim", "null_experts", "num_expert_groups", "num_experts", "router", "router_options",
    "score_function", "seed", "shared_expert_dim", "top_groups", "top_k", "unnormalized_weights",
)  # fmt: skip
# options of routing without effect on a layer whose block goes on routing
_OF_ROUTERS = (
    "balance_choices", "balance_over", "balance_scope", "batch_prioritized", "drop_policy",
    "force_load", "gate_noise", "input_jitter", "load_bias", "load_bias_rate",
    "load_importance_loss", "normalize_before_dropping", "overflow_rerouting",
    "second_expert_policy", "z_loss_weight",
)  # fmt: skip


def replace_moe(
    model: nn.Module, *, groups: ExpertParallelGroups | None = None, **moe: Any
) -> dict[str, nn.Module]:
    """Replace the sparse blocks of a model by MoE layers with the same weights, in place.

    Routing and experts compute what they did, and ``requires_grad`` stays. Call it before you build
    the optimizer and wrap the model. The call is collective; all ranks need the same model.

    The layer takes the place of a block if its options can route as the block does; a correction
    bias becomes its load bias, which stays as it is unless you give ``load_bias``. Otherwise the
    layer takes the place of the block's experts, and the block goes on routing.

    Args:
        model (nn.Module): a model of transformers, or any with such blocks (``recognize.py``).
        groups (ExpertParallelGroups): placement of the experts (default: spread over all ranks).
        **moe: further arguments of :class:`~fairseq_tutel.moe.MoELayer`, such as ``exchange`` and
            ``load_bias`` (default: MoELayer's, but ``capacity_factor=0``, so that no pair is
            dropped, and ``compute_aux=False``). What the block decides is refused.

    Returns:
        dict: name of each layer -> the module that was there, without its experts' weights. Give it
        to ``restore_moe`` and ``original_state_dict``.

    Raises:
        ValueError: no such block, or a block that cannot be replaced. The message names it: another
            output on random rows, several dtypes, hooks, tied experts, quantised or on the meta
            device, options of routing for a block that goes on routing. The model stays as it was.
    """
    if wrong := [name for name in _DECIDED if name in moe]:
        raise ValueError(f"the model's blocks decide {', '.join(wrong)}: leave it out")
    names = {field.name for field in dataclasses.fields(MoEConfig)}
    allowed = {name: value for name, value in moe.items() if name in names}
    others = {name: value for name, value in moe.items() if name not in names}
    blocks = [_read(name, module, allowed) for name, module in find_blocks(model).items()]
    for block in blocks:
        layer = _make_layer(block, groups or build_groups(block.config.num_experts), others)
        parent, _, leaf = block.name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        if isinstance(layer, ChosenExperts):
            steer_router(model.get_submodule(parent), layer)
        block.experts.to("meta")  # its memory is free before the next layer takes as much
    _keep_names_of_dequantised(model)
    return {block.name: block.module for block in blocks}


def _keep_names_of_dequantised(model: Any) -> None:
    """Keep ``save_pretrained`` from giving dequantised matrices the names of quantised ones.

    ``from_pretrained`` would find no weights (MXFP4 of transformers 5), and draw them.
    """
    known = getattr(model, "_weight_conversions", None)
    if known:
        model._weight_conversions = [each for each in known if not _dequantises(each)]


def _dequantises(conversion: Any) -> bool:
    steps = [type(step).__name__ for step in getattr(conversion, "operations", ())]
    return bool(steps) and all(step.endswith("Dequantize") for step in steps)


def _read(name: str, block: nn.Module, allowed: Mapping[str, Any]) -> SparseBlock:
    """Return what is replaced, the block or its experts; raise ValueError if neither can be.

    ``allowed`` are the caller's options of routing, which go before those of the block.
    """
    projections = check_block(name, block)
    where, experts = f"{name} ({type(block).__name__})", block.experts
    modes = (False,)
    if type(block).__name__ in SPARSE_BLOCKS:
        description = declared(name, block, allowed)
        if "input_jitter" not in allowed:
            modes = (False, True)  # for the others recognize() compares training
    else:
        description = recognize(block, projections.shape[0], "input_jitter" in allowed)
    routing = description.routing
    if not description.router:
        if unused := [option for option in _OF_ROUTERS if option in allowed]:
            raise ValueError(f"{where} goes on routing by itself: leave out {', '.join(unused)}")
        routing = {"top_k": 1, "unnormalized_weights": True}  # the block may have any K
    options = {"capacity_factor": 0.0, **routing, **allowed}
    config = MoEConfig(num_experts=projections.shape[0], **options)
    place = (name, block) if description.router else (f"{name}.experts", experts)
    found = SparseBlock(*place, experts, description, config)
    check_same(found, block, where, modes)
    return found


@torch.no_grad()
def _make_layer(
    block: SparseBlock, groups: ExpertParallelGroups, others: dict[str, Any]
) -> MoELayer:
    """Make the layer for a block, with this rank's share of its weights and its other parts."""
    if groups.simulated:
        raise ValueError("simulated ranks have no share of a model's weights: leave them out")
    name, _, experts, parts, config = block
    projections = Projections.of(name, experts)
    _, model_dim, hidden_dim = projections.shape
    views, down = projections.views(), projections.down
    activation, biased = Activation(experts, projections), projections.up_bias is not None
    network = activation.built_in()
    options: dict[str, Any] = {
        "config": config,
        "hidden_dim": hidden_dim,
        "expert_network": network or "swiglu",
        "expert_options": {"bias": biased},
        "groups": groups,
        "seed": 0,
        "compute_aux": False,  # transformers computes the balance loss from the router's logits
        **others,
    }
    if parts.router:
        router = KeptRouter(getattr(block.module, parts.router), model_dim, config, parts)
        router = router.to(down.device)
    else:
        router = ChoiceRouter(model_dim, config)
    with torch.device("meta"):  # do not draw initial weights that are overwritten
        layer = (MoELayer if parts.router else ChosenExperts)(model_dim, gate=router, **options)
        if network is None:
            layer.experts = KeptExperts(
                groups.local_experts,
                model_dim,
                hidden_dim,
                seed=0,
                hidden_slice=(groups.slice_index, groups.num_slices),
                num_holders=groups.num_replicas,
                options={"gated": projections.gated, "bias": biased},
            )
            layer.experts.activate = activation
    layer.experts.to(down.dtype).to_empty(device=down.device)
    layer.experts.mark()  # to_empty made new parameters
    held = enumerate(groups.local_experts)
    state = {f"{slot}.{end}": view[i] for slot, i in held for end, view in views.items()}
    layer.experts.load_state_dict(state)
    for mine, theirs in matching_parameters(layer, experts):
        mine.requires_grad_(theirs.requires_grad)
    if parts.bias and layer.gate.load_bias is not None:
        layer.gate.load_bias.copy_(tensor_at(block.module, parts.bias).flatten())
    if parts.shared:
        layer.shared_expert = shared_of(block.module, parts)
    return layer.train(block.module.training)


def matching_parameters(
    layer: MoELayer, experts: nn.Module
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the layer's stacked parameters beside those of the model's experts."""
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    names = {"fc1_weight": first, "fc2_weight": "down_proj"}
    names |= {"fc1_bias": f"{first}_bias", "fc2_bias": "down_proj_bias"}
    bank = layer.experts
    return [
        (getattr(bank, mine), getattr(experts, theirs))
        for mine, theirs in names.items()
        if hasattr(bank, mine)
    ]
