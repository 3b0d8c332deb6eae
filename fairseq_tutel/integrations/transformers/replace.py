"""Replacement of sparse blocks by MoE layers with the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import ExpertParallelGroups, build_groups
from ...moe import MoEConfig, MoELayer, TopKRouter
from .blocks import SparseBlock, find_sparse_blocks

# arguments of MoELayer that the block decides
_DECIDED = (
    "activation", "expert_fn", "expert_network", "expert_options", "experts", "gate", "hidden_dim",
    "null_experts", "num_experts", "router", "router_options", "score_function", "seed",
    "shared_expert_dim", "top_k", "unnormalized_weights",
)  # fmt: skip


class KeptRouter(TopKRouter):
    """Router that takes its logits from the model's own router, which stays in the model.

    The softmax and the choice of the model's router are computed and not used. Its weight is
    ``gate.wg.weight`` in state dicts, as in a linear router of this package.
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

    Routing and experts compute what they did, in training and in evaluation, and ``requires_grad``
    stays. Call it before you build the optimizer and before you wrap the model for data
    parallelism. The call is collective; all ranks need the same model.

    Args:
        model (nn.Module): a model of transformers, or any that has blocks of ``SPARSE_BLOCKS``.
        groups (ExpertParallelGroups): placement of the experts on ranks (default: spread over all
            ranks).
        **moe: further arguments of :class:`~fairseq_tutel.moe.MoELayer`, such as ``exchange`` and
            ``load_bias`` (default: MoELayer's, but ``capacity_factor=0``, so that no pair is
            dropped, and ``compute_aux=False``). What the block decides is refused.

    Returns:
        dict: name of each layer -> the block that was there, without its experts' weights. Give it
        to ``restore_moe`` and ``original_state_dict``.

    Raises:
        ValueError: no such block, or a block that cannot be replaced. The message names it: shared
            experts, another router, several dtypes, hooks, quantised or on the meta device, another
            activation, jitter of the experts' input. The model then stays as it was.
        TypeError: MoELayer has no such option.
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
    """Make the layer for a block, with this rank's share of its weights."""
    if groups.simulated:
        raise ValueError("simulated ranks have no share of a model's weights: leave them out")
    experts = block.module.experts
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    _, model_dim, hidden_dim = down.shape
    router = KeptRouter(block.module.gate, model_dim, block.config).to(gate_up.device)
    with torch.device("meta"):  # do not draw initial weights that are overwritten
        layer = MoELayer(
            model_dim,
            config=block.config,
            hidden_dim=hidden_dim,
            gate=router,
            expert_network=block.network,
            groups=groups,
            seed=0,
            # transformers computes the balance loss from the router's logits
            **{"compute_aux": False, **others},
        )
    layer.experts.to(gate_up.dtype).to_empty(device=gate_up.device)
    layer.experts.mark()  # to_empty made new parameters
    weights = {}
    for slot, expert in enumerate(groups.local_experts):
        gate, up = gate_up[expert].chunk(2)
        weights |= {f"{slot}.fc_gate.weight": gate, f"{slot}.fc1.weight": up}
        weights[f"{slot}.fc2.weight"] = down[expert]
    layer.experts.load_state_dict(weights)
    layer.experts.fc1_weight.requires_grad_(experts.gate_up_proj.requires_grad)
    layer.experts.fc2_weight.requires_grad_(experts.down_proj.requires_grad)
    return layer.train(block.module.training)
