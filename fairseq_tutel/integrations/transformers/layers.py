"""Parts of an MoE layer that are the model's own: router, chosen experts, shared expert."""

import torch
from torch import Tensor, nn

from ... import moe
from ...moe.routing import with_real_counts
from .blocks import Description


class KeptRouter(moe.TopKRouter):
    """Router that takes its logits, but not its choices, from the model's own router.

    Its parameters are ``gate.wg.*`` in state dicts, as those of a linear router of this package.
    """

    def __init__(
        self, router: nn.Module, model_dim: int, config: moe.MoEConfig, description: Description
    ):
        super().__init__(model_dim, config)
        self.wg = router
        self.description = description

    def logits(self, x_TM: Tensor) -> Tensor:
        x = x_TM.to(next(self.wg.parameters()).dtype)
        bias = (self.load_bias,) if self.description.bias_given else ()
        logits_TE = self.wg(x[None] if self.description.sequences else x, *bias)[0]
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))


class KeptShared(nn.Module):
    """The model's own expert of all tokens, with its gate if it has one."""

    def __init__(self, expert: nn.Module, gate: nn.Module | None):
        super().__init__()
        self.expert, self.gate = expert, gate

    @property
    def hidden_dim(self) -> int:
        """Estimate of its hidden units, for the memory of a step."""
        matrices = [param.shape for param in self.expert.parameters() if param.dim() == 2]
        return max(max(shape) for shape in matrices) if matrices else 0

    def forward(self, x_TM: Tensor) -> Tensor:
        y_TM = self.expert(x_TM)
        return y_TM if self.gate is None else torch.sigmoid(self.gate(x_TM)) * y_TM


def shared_of(block: nn.Module, parts: Description) -> KeptShared | None:
    """Return the block's expert of all tokens with its gate; None if it has none."""
    if not parts.shared:
        return None
    gate = getattr(block, parts.shared_gate) if parts.shared_gate else None
    return KeptShared(getattr(block, parts.shared), gate)


def tensor_at(block: nn.Module, path: str) -> Tensor:
    """Return a parameter or buffer by its path."""
    owner, _, name = path.rpartition(".")
    return getattr(block.get_submodule(owner), name).detach()


class ChoiceRouter(moe.Router):
    """Router of experts and weights that the model's block has chosen.

    There are no probabilities: its balance loss and entropy are 0.
    """

    choice: tuple[Tensor, Tensor] | None = None  # of the call that runs, [T, K] each

    def forward(
        self, x_TM: Tensor, pad_mask_T: Tensor | None, call: moe.RouterCall
    ) -> tuple[moe.Routing, moe.RouterAux | None]:
        if self.choice is None:
            raise ValueError("experts of a replaced model are called by their block")
        index_TK, weight_TK = self.choice
        num_experts = call.config.num_experts
        outside_TK = (index_TK < 0) | (index_TK >= num_experts)
        if pad_mask_T is not None:
            outside_TK = outside_TK | pad_mask_T[:, None]
        expert_TK = index_TK.masked_fill(outside_TK, -1).to(torch.int32)
        weight_TK = weight_TK.to(torch.promote_types(weight_TK.dtype, torch.float32))
        routing = moe.build_routing(expert_TK, weight_TK, call)
        if not call.reports:
            return routing, None
        zero, counts = weight_TK.new_zeros((), dtype=torch.float32), with_real_counts(routing, call)
        return routing, moe.RouterAux(zero + 0 * weight_TK.sum(), zero, counts.num_routed_KE)


class ChosenExperts(moe.MoELayer):
    """MoE layer in the place of a model's experts: its block routes, and calls it as them."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **call):
        """Apply the experts: [T, M], choices int64 [T, K], weights [T, K] -> [T, M].

        A choice of -1, or of at least E, is no expert. ``call``: see :meth:`MoELayer.forward`.
        """
        self.gate.choice = top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2)
        try:
            return super().forward(hidden_states, **call)
        finally:
            self.gate.choice = None
