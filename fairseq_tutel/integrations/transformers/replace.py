"""MoE layers in the place of sparse blocks, with their weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import ExpertParallelGroups, build_groups
from ...moe import MoEConfig, MoELayer, TopKRouter
from .blocks import SparseBlock, find_sparse_blocks

# arguments of MoELayer that are what the block is
_DECIDED = (
    "activation", "expert_fn", "expert_network", "expert_options", "experts", "gate", "hidden_dim",
    "null_experts", "num_experts", "router", "router_options", "score_function", "seed",
    "shared_expert_dim", "top_k", "unnormalized_weights",
)  # fmt: skip


class KeptRouter(TopKRouter):
    """The logits of the router that a model had, which stays a module of the model.

    Its own softmax and choice are computed beside and not used. In state dicts its weight has the
    name that it has in a linear router of this package, ``gate.wg.weight``.
    """

    def __init__(self, router: nn.Module, model_dim: int, config: MoEConfig):
        super().__init__(model_dim, config)
        self.wg = router

    def logits(self, x_TM: Tensor) -> Tensor:
        logits_TE = self.wg(x_TM.to(self.wg.weight.dtype))[0]
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))


def replace_moe(
    model: nn.Module, *, groups: ExpertParallelGroups | None = None, **moe: Any
) -> dict[str, nn.Module]:
    """Replace the sparse blocks of a model by MoE layers with the same weights, in place.

    Outputs are what they were: routing, weights of the experts' outputs and networks are the
    block's, in training and in evaluation. Collective where ranks are several; all of them need
    the same model. Build the optimizer, and wrap the model for data parallelism, afterwards.

    Args:
        model: one of transformers, or any that has blocks of ``SPARSE_BLOCKS``.
        groups: which ranks hold which experts, from
            :func:`~fairseq_tutel.distributed.build_groups`; by default each rank its share of them.
        **moe: of each :class:`~fairseq_tutel.moe.MoELayer`: ``exchange``, ``load_bias``,
            ``capacity_factor`` (0, nothing is dropped, unless it is given) and the like. What the
            block decides is refused. ``compute_aux`` is False unless it is given.

    Returns:
        name -> the block that was there, without its experts' weights: what ``restore_moe`` and
        ``original_state_dict`` need.

    Raises:
        ValueError: no such block; or, by name, one that cannot be replaced: shared experts, another
            router, quantised or on the meta device, another activation, jitter of what experts see.
            The model then stays as it was.
        TypeError: an option that no MoE layer has.
    """
    if decided := [name for name in _DECIDED if name in moe]:
        raise ValueError(f"the model's blocks decide {', '.join(decided)}: leave it out")
    names = {field.name for field in dataclasses.fields(MoEConfig)}
    routing = {"capacity_factor": 0.0, **{k: v for k, v in moe.items() if k in names}}
    others = {name: value for name, value in moe.items() if name not in names}
    found = find_sparse_blocks(model).items()
    blocks = [SparseBlock.of(name, module, routing) for name, module in found]
    for block in blocks:
        layer = _make_layer(block, groups or build_groups(block.config.num_experts), others)
        parent, _, leaf = block.name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        block.module.experts.to("meta")  # its memory is free before the next layer takes as much
    return {block.name: block.module for block in blocks}


@torch.no_grad()
def _make_layer(
    block: SparseBlock, groups: ExpertParallelGroups, others: dict[str, Any]
) -> MoELayer:
    """The layer for a block, with this rank's share of its weights."""
    if groups.simulated:
        raise ValueError("simulated ranks have no share of a model's weights: leave them out")
    experts = block.module.experts
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    _, model_dim, hidden_dim = down.shape
    router = KeptRouter(block.module.gate, model_dim, block.config).to(gate_up.device)
    with torch.device("meta"):  # or initial weights would be drawn, to be overwritten
        layer = MoELayer(
            model_dim,
            config=block.config,
            hidden_dim=hidden_dim,
            gate=router,
            expert_network=block.network,
            groups=groups,
            seed=0,
            # transformers computes its losses from the router's logits
            **{"compute_aux": False, **others},
        )
    layer.experts.to(gate_up.dtype).to_empty(device=gate_up.device)
    layer.experts.mark()  # which are other parameters now
    weights = {}
    for slot, expert in enumerate(groups.local_experts):
        gate, up = gate_up[expert].chunk(2)
        weights |= {f"{slot}.fc_gate.weight": gate, f"{slot}.fc1.weight": up}
        weights[f"{slot}.fc2.weight"] = down[expert]
    layer.experts.load_state_dict(weights)
    layer.experts.fc1_weight.requires_grad_(experts.gate_up_proj.requires_grad)
    layer.experts.fc2_weight.requires_grad_(experts.down_proj.requires_grad)
    return layer.train(block.module.training)
