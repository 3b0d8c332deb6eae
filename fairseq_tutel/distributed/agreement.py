"""Agreement between ranks before they exchange data of a size that depends on it.

One small all-gather per forward pass of the model (not per layer) tells every rank the token counts
of the others and compares the settings. Ranks that disagree get an error with every rank's values.
Without the comparison, mismatched all-to-alls would hang until the process group's timeout (30
minutes by default).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import ExchangeConfig, MoEConfig
from .placement.expert_params import sum_tensor_over_ranks_
from .placement.groups import ExpertParallelGroups
from .world import checksum, compare_settings, gather_integers


@dataclass(frozen=True)
class PassState:
    """State of a layer that decides which collectives its pass makes, and in which order.

    Attributes:
        gradients_of: ``nothing``, ``experts`` or ``tokens`` (then also experts), which the backward
            pass sends between ranks.
        activation_memory: what the experts keep in this pass; hooks on one rank make it ``fast``.
        checkpointing: whether a recomputation repeats the pass, without reentrant autograd.
        experts: size and trained parameters, if weights travel; else empty.
        balance_loss: whether the caller asks for the loss over the tokens of all ranks, and when.
        skip_exchange: whether rows stay on their rank.
    """

    gradients_of: str = ""
    activation_memory: str = ""
    checkpointing: bool = False
    experts: str = ""
    balance_loss: str = ""
    skip_exchange: bool = False


@dataclass(frozen=True)
class StepSettings:
    """Settings that must be equal on all ranks for the exchanges of a forward pass to match.

    Each field, also of a subclass, is a number, a text, a torch.dtype, or a dataclass of them.
    """

    routing: MoEConfig
    exchange: ExchangeConfig
    model_dim: int
    mode: str  # "training" or "evaluation"
    dtype: torch.dtype
    state: PassState = PassState()

    def differences(self, other: StepSettings) -> dict[str, tuple[Any, Any]]:
        """Return name -> (own value, the other's value) for the fields that differ."""
        mine, theirs = flat_settings(self), flat_settings(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


class Timer(Protocol):
    """Timer of a part of each layer in both passes; :mod:`fairseq_tutel.tuning` has one."""

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the input to use in place of x, and a span for :meth:`end`."""
        ...

    def end(self, y: torch.Tensor, span: Any) -> torch.Tensor:
        """Return the output to use in place of y."""
        ...


@dataclass(frozen=True)
class StepAgreement:
    """Values that the ranks of an exchange group (with slices: all ranks) share in a forward pass.

    Attributes:
        num_tokens: largest number of tokens of any rank; capacities follow from it.
        settings: the compared settings; None if the agreement was made by hand and is not checked.
        exchange: exchange for the layers to use in place of their own; None keeps their own.
        timer: timer of the layers from dispatch to combine; None measures nothing.
        draw: random number of the first rank, for equal draws on all ranks; None draws nothing.
    """

    num_tokens: int
    settings: StepSettings | None = None
    exchange: ExchangeConfig | None = None
    timer: Timer | None = None
    draw: int | None = None


def sync_step(
    num_tokens: int, settings: StepSettings | None, groups: ExpertParallelGroups
) -> StepAgreement:
    """Exchange token counts and compare settings before a forward pass. Collective.

    The exchange group takes part; with slices, all ranks. The host reads a few integers: one
    synchronisation per forward pass. Give the result to all layers: ``layer(x, step=step)``.

    >>> from fairseq_tutel.distributed import build_groups
    >>> sync_step(16, None, build_groups(4)).num_tokens  # the largest of any rank
    16

    Args:
        num_tokens (int): tokens of this rank; may be 0.
        settings (StepSettings): values that must agree, from ``MoELayer.step_settings``. None on
            all ranks compares nothing.
        groups (ExpertParallelGroups): placement of the experts.

    Raises:
        ValueError: a value differs; the message lists the ranks by value.
    """
    return sync_stacks([num_tokens], [settings], groups)[0]


def sync_stacks(
    counts: Sequence[int], settings: Sequence[StepSettings | None], groups: ExpertParallelGroups
) -> list[StepAgreement]:
    """Agree as :func:`sync_step` for several stacks of layers at once. Collective.

    An encoder-decoder has two stacks. Counts, settings and results have one entry for each stack.
    """
    if not groups.needs_sync:
        return list(map(StepAgreement, counts, settings))
    steps, _ = _sync(counts, settings, (), *_group_of_exchanges(groups))
    return steps


def sync_step_and_word(
    num_tokens: int, settings: StepSettings, groups: ExpertParallelGroups, word: int
) -> tuple[StepAgreement, dict[int, int]]:
    """Agree as :func:`sync_step`, and also return each rank's ``word`` by rank of the job."""
    group, first_rank = _group_of_exchanges(groups)
    (step,), table = _sync([num_tokens], [settings], [word], group, first_rank)
    return step, {first_rank + number: row[-1] for number, row in enumerate(table)}


def _group_of_exchanges(groups: ExpertParallelGroups) -> tuple[Any, int]:
    """Return the process group that agrees on steps (None: the default one) and its first rank."""
    if groups.num_slices > 1:
        return groups.control_group, 0
    return groups.control_group or groups.ep_group, groups.rank - groups.ep_rank


def sync_stacks_of_all(
    counts: Sequence[int],
    settings: Sequence[StepSettings],
    groups: ExpertParallelGroups,
    words: Sequence[int],
) -> tuple[list[StepAgreement], list[list[int]]]:
    """Agree as :func:`sync_stacks`, and gather integers of all ranks of the job. Collective.

    Every rank gives equally many ``words``. Return the agreements, on the tokens of the exchange
    group, and ``[*counts, *words]`` of each rank.
    """
    everyone = groups.ep_size == groups.world_size or groups.num_slices > 1
    group = groups.control_group if everyone else None  # None: the default group
    block = slice(None)
    if groups.num_slices == 1:
        first = groups.rank - groups.ep_rank
        block = slice(first, first + groups.ep_size)
    return _sync(counts, settings, words, group, 0, block)


def _sync(counts, settings, words, group, first_rank, block=slice(None)):
    """Return agreements on the tokens of a block of ranks, and each rank's [*counts, *words]."""
    own_checksum = _checksum(tuple(settings))
    training = [each.routing for each in settings if each and each.mode == "training"]
    draws = any(routing.local_drop > 0 for routing in training)
    # always sent, because ranks with different settings must send equally many numbers
    own_draw = int(torch.randint(2**62, ())) if draws else 0
    table = gather_integers([own_checksum, own_draw, *counts, *words], group)
    if any(row[0] != own_checksum for row in table):
        compare_settings(_all_settings(settings), group, first_rank)  # raises
    draw = table[block][0][1] if draws else None
    table = [numbers for _, _, *numbers in table]
    largest = [max(row[i] for row in table[block]) for i in range(len(counts))]
    steps = [
        StepAgreement(tokens, each, draw=draw)
        for tokens, each in zip(largest, settings, strict=True)
    ]
    return steps, table


@functools.lru_cache(maxsize=64)  # most steps have the same settings
def _checksum(settings: tuple[StepSettings | None, ...]) -> int:
    values = _all_settings(settings).values()
    # float(): a number may be an int on one rank and a float on another
    return checksum(repr([v if isinstance(v, str) else float(v) for v in values]))


def _all_settings(settings: Sequence[StepSettings | None]) -> dict[str, float | str]:
    """Return the values that ranks compare, by name.

    The stacks of a model share its options; only their widths differ. So the first stack counts in
    full and the others with their widths.
    """
    first, *others = settings
    values = {} if first is None else flat_settings(first)
    for number, other in enumerate(others, 2):
        if other is not None:
            values[f"model_dim of stack {number}"] = other.model_dim
    return values


def flat_settings(settings: Any) -> dict[str, float | str]:
    """Return the numbers and texts of a dataclass, and of dataclasses in it, by name."""
    found: dict[str, float | str] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat_settings(value)
        else:
            found[field.name] = value if isinstance(value, (int, float)) else str(value)
    return found


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any rank of the default group. Collective."""
    return sum_over_ranks([flag], device)[0] > 0


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the sums over all ranks of the default group, in fp64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    return sum_tensor_over_ranks_(total).tolist()
