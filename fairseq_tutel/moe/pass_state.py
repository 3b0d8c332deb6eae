"""State of a layer that ranks must share in a pass, beside its options."""

import torch

from ..distributed import PassState
from ..distributed.exchanges import LocalCopy
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank
from .lean import keeps_less
from .torch_modes import checkpoints, is_observed


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
    """Return what the experts keep, and whether chunks differ from those of other ranks."""
    if keeps_less(experts):
        return experts.memory.mode
    in_chunks = choice.overlap_degree == 1 or (
        isinstance(experts, ExpertBank) and experts.computes_chunks
    )
    wanted = getattr(experts, "memory", ExpertBank.memory).mode
    if in_chunks and wanted == "fast":
        return "fast"
    reason = "hooks or a wrapper observe the experts" if is_observed(experts) else "chunk by chunk"
    return f"fast, {reason}"


def _described(experts: torch.nn.Module, training: bool) -> str:
    """Return the sizes and modes that ranks share if weights travel between them."""
    size = sum(param.numel() for param in experts.parameters())
    mode = "training" if experts.training else "evaluation"
    trained = f", training {' '.join(_trained(experts)) or 'nothing'}" if training else ""
    return f"{type(experts).__name__} of {size} weights in {mode} mode{trained}"
