"""The dense formulation of an MoE layer, the yardstick of the sparse layer.

GShard (arXiv 2006.16668): algorithm 1 gives combine_weights [T, E, C], algorithm 2 the products
with it. Every token is multiplied by every slot of every expert: O(k f T^2 M) operations, and masks
of O(k f T^2) numbers. What the paper leaves open (which gates are normalised when, what a dropped
second choice does to the first) follows fairseq's ``moe`` branch, as ``MoELayer`` does.

T tokens of this rank, M model dim, E experts, e local experts, C capacity, K top-k, W ranks.
"""

import torch
from torch import Tensor, nn

from fairseq_tutel.distributed import sync_step
from fairseq_tutel.moe import ExpertRows, MoEAux, MoELayer

# tensors of T*E*C elements that live at once in the backward pass: combine weights, dispatch mask,
# and gradients of the combine weights
LIVE_MASKS = 3
# routing options that algorithm 1 knows
_WRITTEN_FOR = {
    "second_expert_policy": "all",
    **dict.fromkeys(("normalize_before_dropping", "unnormalized_weights"), False),
    **dict.fromkeys(("batch_prioritized", "use_pad_mask"), False),
    **dict.fromkeys(("gate_noise", "input_jitter", "input_dropout", "z_loss_weight"), 0.0),
}


class DenseMoE(nn.Module):
    """The dense formulation with the parameters of a ``MoELayer``, callable in its place.

    Raises ValueError if the layer has no fixed capacity, or routing that algorithm 1 does not know.
    """

    def __init__(self, layer: MoELayer):
        super().__init__()
        config = layer.config
        if config.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor={config.capacity_factor}: the dense formulation needs a fixed "
                "capacity, > 0"
            )
        for name, known in _WRITTEN_FOR.items():
            if getattr(config, name) != known:
                raise ValueError(f"{name}={getattr(config, name)!r}: written for {known!r} only")
        self.layer = layer

    def forward(
        self, x: Tensor, *, step=None, return_aux: bool = False, **_
    ) -> Tensor | tuple[Tensor, MoEAux]:
        """Compute the layer in training mode; ``aux`` has a loss and the load, no more."""
        layer = self.layer
        x_TM = x.reshape(-1, x.shape[-1])
        if step is None:
            step = sync_step(x_TM.shape[0], layer.step_settings(x.dtype), layer.groups)
        capacity = layer.config.capacity(step.num_tokens, training=True)
        combine_TEC, loss, load_E = gating(layer.gate.logits(x_TM), layer.config.top_k, capacity)
        y = self.products(x_TM, combine_TEC).view(x.shape)
        load_KE = load_E[None]
        aux = MoEAux(loss, torch.zeros_like(loss), load_KE, load_KE, load_E, x_TM.shape[0])
        return (y, aux) if return_aux else y

    def products(self, x_TM, combine_TEC):
        """Compute algorithm 2, lines 3 to 7, with the all-to-alls of GShard's sharding."""
        groups = self.layer.groups
        ranks, local = groups.ep_size, groups.num_local_experts
        num_tokens, num_experts, capacity = combine_TEC.shape
        model_dim = x_TM.shape[1]
        # einsum("tec,tm->ecm"), written as the one matrix product that it is
        mask_TR = combine_TEC.bool().to(x_TM.dtype).view(num_tokens, num_experts * capacity)
        rows = self.layer.exchange.dispatch(mask_TR.t() @ x_TM)
        rows = rows.view(ranks, local, capacity, model_dim).transpose(0, 1)
        out = self.layer.experts(ExpertRows(rows.reshape(local, ranks * capacity, model_dim)))
        out = out.view(local, ranks, capacity, model_dim).transpose(0, 1).reshape(-1, model_dim)
        # einsum("tec,ecm->tm")
        return combine_TEC.to(x_TM.dtype).view(num_tokens, -1) @ self.layer.exchange.combine(out)


def gating(logits_TE: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by algorithm 1 of GShard with plain top-k choices.

    Args:
        logits_TE: fp32 [T, E], with gradient.

    Returns:
        combine weights fp32 [T, E, C], zero but for the slots of each token; balance loss, fp32
        scalar, 1.0 at perfect balance; load_E int64 [E], choices per expert before dropping.
    """
    num_tokens, num_experts = logits_TE.shape
    gates_TE = logits_TE.softmax(dim=1)
    remaining_TE = gates_TE.detach().clone()
    masks, locations = [], []
    taken_E = torch.zeros(num_experts, dtype=torch.int64, device=logits_TE.device)
    for _ in range(top_k):
        index_T = remaining_TE.argmax(dim=1)
        mask_TE = nn.functional.one_hot(index_T, num_experts)
        remaining_TE.masked_fill_(mask_TE.bool(), float("-inf"))
        locations.append(torch.cumsum(mask_TE, dim=0) - 1 + taken_E)
        taken_E = taken_E + mask_TE.sum(dim=0)
        masks.append(mask_TE)
    loss = num_experts * (gates_TE.mean(dim=0) * masks[0].to(gates_TE.dtype).mean(dim=0)).sum()

    kept = [mask * (place < capacity) for mask, place in zip(masks, locations, strict=True)]
    gate_KT = torch.stack([(gates_TE * mask_TE).sum(dim=1) for mask_TE in kept])
    if top_k > 1:
        gate_KT = gate_KT / gate_KT.sum(dim=0).clamp(min=torch.finfo(gate_KT.dtype).eps)
    combine_TEC = None
    for gate_T, mask_TE, location_TE in zip(gate_KT, kept, locations, strict=True):
        slot_T = (location_TE * mask_TE).sum(dim=1)
        slot_TC = nn.functional.one_hot(slot_T, capacity).to(gates_TE.dtype)
        # einsum("te,tc->tec"); its backward pass as bmm needs no product of this size
        part_TEC = torch.bmm((gate_T[:, None] * mask_TE)[:, :, None], slot_TC[:, None, :])
        combine_TEC = part_TEC if combine_TEC is None else combine_TEC + part_TEC
    return combine_TEC, loss, taken_E
