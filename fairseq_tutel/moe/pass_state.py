"""State of a layer that ranks must share in a pass, beside its options."""

from typing import Any

import torch

from ..backends._torch_private import checkpoints
from ..distributed import PassState
from ..distributed.exchanges import LocalCopy
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank, is_fused
from .torch_modes import is_observed


def pass_state(
    experts: torch.nn.Module,
    choice: ExchangeChoice,
    training: bool,
    x: torch.Tensor | None = None,
    balance_loss: str = "",
) -> PassState:
    """Return what decides the collectives of a layer's pass on this rank.

    ``x`` are the tokens (default None: unknown). In evaluation ranks need not agree on gradients:
    there one rank may compute a filler, for which nobody calls ``backward``.
    """
    skips = isinstance(choice.exchange.algorithm, LocalCopy)
    travel = choice.balances or not choice.parallelism.is_replicated
    described = _described(experts, training) if travel else ""
    if not training:
        return PassState(experts=described, skip_exchange=skips)
    if not torch.is_grad_enabled():
        gradients_of = "nothing"
    elif x is not None and x.requires_grad:
        gradients_of = "tokens"
    else:
        gradients_of = "experts" if _trained(experts) else "nothing"
    memory = _memory(experts, choice)
    return PassState(gradients_of, memory, checkpoints(), described, balance_loss, skips)


def _trained(experts: torch.nn.Module) -> list[str]:
    return [name for name, param in experts.named_parameters() if param.requires_grad]


def _memory(experts: torch.nn.Module, choice: ExchangeChoice) -> str:
    """Return what a network keeps; or that the experts are called, if the order depends on it."""
    direct = isinstance(experts, ExpertBank) and not is_observed(experts)
    if direct and is_fused(experts):
        memory: Any = experts.memory
        return memory.mode
    if choice.overlap_degree == 1:
        return "fast"
    return "hooks or a wrapper observe the experts" if is_observed(experts) else "chunk by chunk"


def _described(experts: torch.nn.Module, training: bool) -> str:
    """Return the sizes and modes that ranks share if weights travel between them."""
    size = sum(param.numel() for param in experts.parameters())
    mode = "training" if experts.training else "evaluation"
    trained = f", training {' '.join(_trained(experts)) or 'nothing'}" if training else ""
    return f"{type(experts).__name__} of {size} weights in {mode} mode{trained}"
