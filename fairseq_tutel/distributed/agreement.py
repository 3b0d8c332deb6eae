"""Agreement between ranks before they exchange data of a size that depends on it.

One small all-gather per forward pass of the model (not per layer) gives every rank how many tokens
the others bring, and compares what must be equal. Ranks that disagree get an error with every
rank's values at once, where mismatched all-to-alls would hang until the process group's timeout (30
minutes by default).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import ExchangeConfig
from .gather import gather_integers, refuse_differences
from .groups import ExpertParallelGroups, process_world

_TEXT_WORDS = 4  # of 8 bytes: the longest text that is compared


def setting(label: str) -> Any:
    """A field of :class:`StepSettings`, which errors call so.

    An int, a float, a text, a torch.dtype, or a dataclass of such, whose fields are compared one by
    one and called by their names or by a label in their metadata.
    """
    return dataclasses.field(metadata={"label": label})


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What the ranks must have in common for the exchanges of a forward pass to fit together.

    A field that is added here (or in a subclass) with :func:`setting` is compared like the others.
    Texts may have up to 32 bytes.
    """

    num_experts: int = setting("the number of experts")
    top_k: int = setting("top_k")
    model_dim: int = setting("the model dimension")
    mode: str = setting("training or evaluation mode")
    capacity_factor: float = setting("the capacity factor in training")
    eval_capacity_factor: float = setting("the capacity factor in evaluation")
    eval_capacity_token_fraction: float = setting(
        "the capacity as a fraction of tokens in evaluation"
    )
    exchange: ExchangeConfig = setting("the exchange")
    dtype: torch.dtype = setting("the dtype of the tokens")
    null_experts: int = dataclasses.field(
        default=0, metadata={"label": "the number of null experts"}
    )

    def differences(self, other: StepSettings) -> dict[str, tuple[Any, Any]]:
        """Label -> (own value, the other's) where they differ."""
        pairs = zip(labelled_fields(self), labelled_fields(other), strict=True)
        return {label: (mine, theirs) for (label, mine), (_, theirs) in pairs if mine != theirs}


@dataclass(frozen=True)
class StepAgreement:
    """What ranks agreed on for one forward pass: those of an exchange group, all with slices.

    Attributes:
        num_tokens: the largest token count of any rank; capacities are computed from it, so that
            they are the same everywhere.
        settings: what was compared; None in an agreement made by hand, which is taken on trust.
        exchange: what the layers of this pass use in place of their own; None: their own.
        timer: :class:`~fairseq_tutel.moe.RegionTimer` of their regions; None: they are not timed.
    """

    num_tokens: int
    settings: StepSettings | None = None
    exchange: ExchangeConfig | None = None
    timer: Any | None = None


def sync_step(
    num_tokens: int, settings: StepSettings | None, groups: ExpertParallelGroups
) -> StepAgreement:
    """Exchange token counts and compare settings with the other ranks of the exchange group.

    With experts in slices with all ranks: tokens may then go to, and weights come from, all.

    NOTE: this reads a few integers back to the host, one synchronisation per forward pass.

    Args:
        num_tokens: tokens of this rank, 0 included.
        settings: what has to be the same on all ranks; None (then on all ranks) compares nothing.

    Raises:
        ValueError: some value differs; the message lists the ranks by value.
    """
    if not groups.agrees:
        return StepAgreement(num_tokens, settings)
    # None: the default group
    group = groups.control_group or (groups.ep_group if groups.num_slices == 1 else None)
    first_rank = groups.rank - groups.ep_rank if groups.num_slices == 1 else 0
    step, _ = _sync(num_tokens, settings, (), group, first_rank)
    return step


def sync_step_of_all(
    num_tokens: int, settings: StepSettings, groups: ExpertParallelGroups, words: Sequence[int]
) -> tuple[StepAgreement, list[list[int]]]:
    """:func:`sync_step` among all ranks, whether they exchange tokens or not.

    Args:
        num_tokens, settings, groups: of :func:`sync_step`.
        words: as many integers on every rank, which travel along.

    Returns:
        The agreement, with the token counts of the exchange group, and the words of every rank.
    """
    everyone = groups.ep_size == groups.world_size or groups.num_slices > 1
    group = groups.control_group if everyone else None  # None: the default group
    block = slice(None)
    if groups.num_slices == 1:
        first = groups.rank - groups.ep_rank
        block = slice(first, first + groups.ep_size)
    return _sync(num_tokens, settings, words, group, 0, block)


def _sync(num_tokens, settings, words, group, first_rank, block=slice(None)):
    """(agreement on the tokens of a block of the group's ranks, words of all its ranks)."""
    table = gather_integers([num_tokens, *words, *_encode(settings)], group)
    settings_by_rank = [row[1 + len(words) :] for row in table]
    if any(each != settings_by_rank[0] for each in settings_by_rank):
        _refuse(settings, settings_by_rank, first_rank)
    step = StepAgreement(max(row[0] for row in table[block]), settings)
    return step, [row[1 : 1 + len(words)] for row in table]


def labelled_fields(settings: Any | None) -> list[tuple[str, Any]]:
    """(label, value) of every field of a dataclass, those of dataclasses in it included."""
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(settings) if settings is not None else ():
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found += labelled_fields(value)
        else:
            found.append((field.metadata.get("label", field.name), value))
    return found


def _encode(settings: StepSettings | None) -> list[int]:
    """The settings as 64-bit integers, of which every rank has as many."""
    words: list[int] = []
    for label, value in labelled_fields(settings):
        if isinstance(value, (int, float)):
            words += struct.unpack("<q", struct.pack("<d", value))
            continue
        raw = str(value).encode()
        if len(raw) > 8 * _TEXT_WORDS:
            raise ValueError(f"{label}: {value!r} is longer than {8 * _TEXT_WORDS} bytes")
        words += struct.unpack(f"<{_TEXT_WORDS}q", raw.ljust(8 * _TEXT_WORDS, b"\0"))
    return words


def _refuse(settings: StepSettings, words_by_rank: list[list[int]], first_rank: int) -> None:
    """Raise for the first setting that differs; values are decoded by the types of one's own."""
    begin = 0
    for label, value in labelled_fields(settings):
        size = 1 if isinstance(value, (int, float)) else _TEXT_WORDS
        raws = [struct.pack(f"<{size}q", *words[begin : begin + size]) for words in words_by_rank]
        if size == 1:
            values = [struct.unpack("<d", raw)[0] for raw in raws]
            if all(v.is_integer() for v in values) and isinstance(value, int):
                values = [int(v) for v in values]
        else:
            values = [raw.rstrip(b"\0").decode() for raw in raws]
        refuse_differences(label, values, first_rank)
        begin += size


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the default group. Collective."""
    _, world_size = process_world()
    if world_size == 1:
        return flag
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums over all ranks of the default group, in fp64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if process_world()[1] > 1:
        dist.all_reduce(total)
    return total.tolist()
