"""Agreement between ranks before they exchange data of a size that depends on it.

One small all-gather per forward pass of the model (not per layer) gives every rank how many tokens
the others bring, and compares what must be equal. Ranks that disagree get an error with every
rank's values at once, where mismatched all-to-alls would hang until the process group's timeout (30
minutes by default).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..config import ExchangeConfig
from .placement.groups import ExpertParallelGroups
from .world import checksum, compare_settings, gather_integers, process_world


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What ranks must have in common for the exchanges of a forward pass to fit together.

    Each field, also of a subclass, is a number, a text, a torch.dtype, or a dataclass of such.
    """

    num_experts: int
    null_experts: int
    top_k: int
    model_dim: int
    mode: str
    capacity_factor: float
    eval_capacity_factor: float
    eval_capacity_token_fraction: float
    exchange: ExchangeConfig
    dtype: torch.dtype
    local_drop: float = 0.0

    def differences(self, other: StepSettings) -> dict[str, tuple[Any, Any]]:
        """Name -> (own value, the other's) where they differ."""
        mine, theirs = flat_settings(self), flat_settings(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


class Timer(Protocol):
    """Measures a part of each layer, in both passes; :mod:`fairseq_tutel.tuning` has one."""

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The input of the part, to be used in place of x, and what :meth:`end` needs."""

    def end(self, y: torch.Tensor, span: Any) -> torch.Tensor:
        """The output of the part, to be used in place of y."""


@dataclass(frozen=True)
class StepAgreement:
    """What ranks agreed on for one forward pass: those of an exchange group, all with slices."""

    num_tokens: int  # the largest of any rank, from which capacities are computed
    settings: StepSettings | None = None  # what was compared; None: made by hand, taken on trust
    exchange: ExchangeConfig | None = None  # what layers use in place of their own
    timer: Timer | None = None  # of what they do from dispatch to combine
    draw: int | None = None  # the first rank's, for what ranks draw alike; None: nothing is drawn


def sync_step(
    num_tokens: int, settings: StepSettings | None, groups: ExpertParallelGroups
) -> StepAgreement:
    """Exchange token counts and compare settings before a forward pass. Collective.

    The exchange group takes part; with slices, all ranks. The host reads a few integers, which is
    one synchronisation per forward pass. Give the result to all layers: ``layer(x, step=step)``.

    >>> from fairseq_tutel.distributed import build_groups
    >>> sync_step(16, None, build_groups(4)).num_tokens  # the largest of any rank
    16

    Args:
        num_tokens (int): tokens of this rank; may be 0.
        settings (StepSettings): values that must agree, see ``MoELayer.step_settings``. None, which
            all ranks then give, compares nothing.
        groups (ExpertParallelGroups): placement of the experts.

    Returns:
        StepAgreement: the agreed values.

    Raises:
        ValueError: a value differs; the message lists the ranks by value.
    """
    return sync_stacks([num_tokens], [settings], groups)[0]


def sync_stacks(
    counts: Sequence[int], settings: Sequence[StepSettings | None], groups: ExpertParallelGroups
) -> list[StepAgreement]:
    """:func:`sync_step` of a model with several stacks of layers, such as an encoder and a decoder:
    a count of tokens, settings and an agreement for each, in one exchange.
    """
    if not groups.needs_sync:
        return list(map(StepAgreement, counts, settings))
    steps, _ = _sync(counts, settings, (), *_group_of_exchanges(groups))
    return steps


def sync_step_and_word(
    num_tokens: int, settings: StepSettings, groups: ExpertParallelGroups, word: int
) -> tuple[StepAgreement, dict[int, int]]:
    """:func:`sync_step` of ranks that also tell each other a word, by rank of the job."""
    group, first_rank = _group_of_exchanges(groups)
    (step,), table = _sync([num_tokens], [settings], [word], group, first_rank)
    return step, {first_rank + number: row[-1] for number, row in enumerate(table)}


def _group_of_exchanges(groups: ExpertParallelGroups) -> tuple[Any, int]:
    """Of ranks that exchange tokens, with slices all: the process group (None: the default one),
    and its first rank."""
    if groups.num_slices > 1:
        return groups.control_group, 0
    return groups.control_group or groups.ep_group, groups.rank - groups.ep_rank


def sync_stacks_of_all(
    counts: Sequence[int],
    settings: Sequence[StepSettings],
    groups: ExpertParallelGroups,
    words: Sequence[int],
) -> tuple[list[StepAgreement], list[list[int]]]:
    """:func:`sync_stacks` among all ranks, whether they exchange tokens or not: the agreements, on
    the tokens of the exchange group, and counts and ``words`` of every rank, as many integers on
    each.
    """
    everyone = groups.ep_size == groups.world_size or groups.num_slices > 1
    group = groups.control_group if everyone else None  # None: the default group
    block = slice(None)
    if groups.num_slices == 1:
        first = groups.rank - groups.ep_rank
        block = slice(first, first + groups.ep_size)
    return _sync(counts, settings, words, group, 0, block)


def _sync(counts, settings, words, group, first_rank, block=slice(None)):
    """(agreements on the tokens of a block of the group's ranks, [*counts, *words] of all its
    ranks)."""
    same = _checksum(tuple(settings))
    draws = any(each.local_drop > 0 and each.mode == "training" for each in settings if each)
    # in any case a number: ranks that disagree send as many as others
    own = int(torch.randint(2**62, ())) if draws else 0
    table = gather_integers([same, own, *counts, *words], group)
    if any(row[0] != same for row in table):
        compare_settings(_all_settings(settings), group, first_rank)
    draw = table[block][0][1] if draws else None
    table = [row[2:] for row in table]
    largest = [max(row[i] for row in table[block]) for i in range(len(counts))]
    steps = [
        StepAgreement(tokens, each, draw=draw)
        for tokens, each in zip(largest, settings, strict=True)
    ]
    return steps, table


@functools.lru_cache(maxsize=64)  # they are the same in most steps
def _checksum(settings: tuple[StepSettings | None, ...]) -> int:
    values = _all_settings(settings).values()
    # a float may be whole on one rank only
    return checksum(repr([v if isinstance(v, str) else float(v) for v in values]))


def _all_settings(settings: Sequence[StepSettings | None]) -> dict[str, float | str]:
    """What ranks compare: those of the first stack by name, and others' that may differ from its
    own: the stacks of one model have its options in common, but for their widths.
    """
    first, *others = settings
    values = {} if first is None else flat_settings(first)
    for number, other in enumerate(others, 2):
        if other is not None:
            values[f"model_dim of stack {number}"] = other.model_dim
    return values


def flat_settings(settings: Any) -> dict[str, float | str]:
    """Numbers and texts of a dataclass by name, those of dataclasses in it included."""
    found: dict[str, float | str] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat_settings(value)
        else:
            found[field.name] = value if isinstance(value, (int, float)) else str(value)
    return found


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the default group. Collective."""
    return sum_over_ranks([flag], device)[0] > 0


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Sums over all ranks of the default group, in fp64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if process_world()[1] > 1:
        dist.all_reduce(total)
    return total.tolist()
