"""Parts of an MoE layer that are the model's own: router, chosen experts, shared expert."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import moe
from ...moe.routing import with_real_counts
from ...moe.torch_modes import untraced
from .blocks import Description
from .recognize import ROUTERS


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
        index_TK, weight_TK = _steered(*self.choice, call.steering)
        outside_TK = (index_TK < 0) | (index_TK >= call.config.num_experts)
        if pad_mask_T is not None:
            outside_TK = outside_TK | pad_mask_T[:, None]
        expert_TK = index_TK.masked_fill(outside_TK, -1).to(torch.int32)
        weight_TK = weight_TK.to(torch.promote_types(weight_TK.dtype, torch.float32))
        routing = moe.build_routing(expert_TK, weight_TK, call)
        if not call.reports:
            return routing, None
        zero, counts = weight_TK.new_zeros((), dtype=torch.float32), with_real_counts(routing, call)
        return routing, moe.RouterAux(zero + 0 * weight_TK.sum(), zero, counts.num_routed_KE)


def _steered(index_TK: Tensor, weight_TK: Tensor, steering: Any) -> tuple[Tensor, Tensor]:
    """Return the choices and weights of a call, which are the given ones if there are any.

    The block's router has weighted given choices already (:func:`steer_router`). Raise ValueError
    if it has not.
    """
    given_TK = None if steering is None else steering.take()
    if given_TK is None:
        return index_TK, weight_TK
    if steering.weight_TK is not None:
        return given_TK, steering.weight_TK
    if given_TK.shape != index_TK.shape:
        raise ValueError(
            f"choices has {given_TK.shape[1]} experts per token, the model's router chooses "
            f"{index_TK.shape[1]}"
        )
    if bool(((given_TK >= 0) & (given_TK != index_TK)).any()):
        raise ValueError(
            "choices cannot steer this model's router: it does not choose by one torch.topk over "
            "the experts, in a module `gate` or `router`"
        )
    return given_TK, weight_TK


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

    def _compute(self, x, *, choices=None, **call):
        if choices is not None and choices.shape[:-1].numel() == x.shape[:-1].numel():
            choices = choices.view(*x.shape[:-1], -1)  # given by sequence, called with tokens
        return super()._compute(x, choices=choices, **call)


def steer_router(block: nn.Module, layer: ChosenExperts) -> None:
    """Make the block's router weight the choices that ``replay_choices`` gives to its experts."""
    for router in _routers(block):
        router.forward = partial(_route, router.forward, layer)


def release_router(block: nn.Module) -> None:
    """Undo :func:`steer_router`."""
    for router in _routers(block):
        own = vars(router).pop("forward").args[0]
        if getattr(own, "__self__", None) is not router:  # somebody had replaced it
            router.forward = own


def _routers(block: nn.Module) -> list[Any]:
    found = (getattr(block, name, None) for name in ROUTERS)
    return [router for router in found if isinstance(router, nn.Module)]


def _route(forward: Callable, layer: ChosenExperts, *args: Any, **kwargs: Any) -> Any:
    """Call the model's router for a layer of its experts."""
    if layer.requests.served:
        return _route_by_requests(forward, layer, args, kwargs)
    return forward(*args, **kwargs)


@untraced  # a trace sees no modes
def _route_by_requests(forward: Callable, layer: ChosenExperts, args: Any, kwargs: Any) -> Any:
    _, asked = layer.requests.of_call()
    if asked.get("choices") is None:
        return forward(*args, **kwargs)
    with _GivenTopK(asked["choices"], layer.config.num_experts):
        return forward(*args, **kwargs)


class _GivenTopK(TorchFunctionMode):
    """Mode in which the experts that ``torch.topk`` finds are given; -1: as it finds them."""

    def __init__(self, choices: Tensor, num_experts: int):
        super().__init__()
        self.choices, self.num_experts = choices, num_experts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, found_index = args[0] if args else kwargs["input"], found.indices
        over_experts = scores.shape[-1] == self.num_experts
        if not over_experts or found_index.numel() != self.choices.numel():
            return found
        given = self.choices.to(found_index).view_as(found_index)
        index = torch.where(given < 0, found_index, given)
        return torch.return_types.topk([scores.gather(-1, index), index])
