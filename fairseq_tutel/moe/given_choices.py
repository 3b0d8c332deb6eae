"""Choices that a caller gives to a layer, and choices that a caller records.

A recorded choice is the number of an expert, null experts included, before capacity drops anything.
-1 is no choice: padding. ``-2 - e`` is expert e that ``second_expert_policy="random"`` rejected;
its gate value still counts with ``normalize_before_dropping``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from ..config import MoEConfig, share_ends

# whose numbers fit int64
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclasses.dataclass
class Steering:
    """Choices of one call of a layer."""

    given_TK: torch.Tensor | None = None  # int32, choices to route by; None: the router chooses
    weight_TK: torch.Tensor | None = None  # fp32 or fp64, of the given choices; None: the gate's
    taken: bool = False  # whether the router used the given choices
    chosen_TK: torch.Tensor | None = None  # int32, by the router; None if it does not say so
    recorder: Callable[[torch.Tensor], None] | None = None  # gets the choices [..., K]

    def take(self) -> torch.Tensor | None:
        """Return the given experts, rejected ones too, -1 for none; None if nothing is given."""
        if self.given_TK is None:
            return None
        self.taken = True
        return decode(self.given_TK)

    def finish(self, expert_TK: torch.Tensor, shape: Sequence[int]) -> None:
        """Check that the router took the given choices; pass all, [*shape, K], to the recorder."""
        if self.given_TK is not None and not self.taken:
            raise ValueError(
                "choices= and force_load= need a router that calls route_logits(), as a TopKRouter"
            )
        chosen_TK = expert_TK if self.chosen_TK is None else self.chosen_TK
        if self.recorder is not None:
            self.recorder(chosen_TK.detach().view(*shape, chosen_TK.shape[1]))


def top_k_of(choices: torch.Tensor | None, top_k: int | None, config: MoEConfig) -> int | None:
    """Return the ``top_k`` of a call: that of the choices; None for the layer's own."""
    if choices is None:
        return top_k
    given = choices.shape[-1] if choices.dim() else 0
    if top_k not in (None, given):
        raise ValueError(f"choices has {given} experts per token, and top_k={top_k}: give one")
    return None if given == config.top_k else given


def steer(
    choices: torch.Tensor | None,
    weights: torch.Tensor | None,
    config: MoEConfig,
    shape: torch.Size,
    device: torch.device,
    recorder: Callable[[torch.Tensor], None] | None = None,
) -> Steering | None:
    """Check the choices of a call and return what its router needs; None if nothing is asked.

    ``shape`` is that of x without M.
    NOTE: the host waits for the device to check the numbers. Raise ValueError for wrong ones.
    """
    if choices is None:
        if weights is not None:
            raise ValueError("weights= belongs to choices=, which is not given")
        if config.force_load:
            forced_TK = forced_choices(config, shape.numel(), device)
            return Steering(forced_TK, recorder=recorder)
        return Steering(recorder=recorder) if recorder is not None else None
    if choices.dtype not in _INTEGERS or choices.shape[:-1] != shape:
        raise ValueError(
            f"choices must be integers {(*shape, 'K')}, got {choices.dtype} {tuple(choices.shape)}"
        )
    given_TK = choices.reshape(-1, choices.shape[-1])
    expert_TK = decode(given_TK.long())  # checked before a cast to int32 could wrap around
    if expert_TK.numel() and int(expert_TK.max()) >= config.num_outputs:
        raise ValueError(
            f"choices has expert {int(expert_TK.max())}, the layer has {config.num_outputs}"
        )
    sorted_TK = expert_TK.sort(1).values
    twice = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    if bool(twice.any()):
        token = int(twice.any(1).nonzero()[0])
        raise ValueError(f"choices gives token {token} an expert twice: {given_TK[token].tolist()}")
    given_TK = given_TK.to(torch.int32)
    if weights is None:
        return Steering(given_TK, recorder=recorder)
    if weights.shape != choices.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating point {tuple(choices.shape)}, as choices, got "
            f"{weights.dtype} {tuple(weights.shape)}"
        )
    if config.overflow_rerouting:
        raise ValueError(
            f"weights= needs overflow_rerouting=0, not {config.overflow_rerouting}: it takes others"
        )
    weight_TK = weights.reshape(given_TK.shape)
    dtype = torch.promote_types(weights.dtype, torch.float32)
    return Steering(given_TK, weight_TK.to(dtype), recorder=recorder)


def forced_choices(config: MoEConfig, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the choices of ``force_load``, int32 [T, K]: each expert gets its share of T K pairs.

    The experts divide a line of T K places by their shares. Token t, after an even shuffle, has the
    places t, t + T, t + 2 T and so on. No expert has more than T places, so these are K experts.
    """
    pairs = config.top_k * num_tokens
    ends = share_ends(config.force_load, config.num_experts)
    end_E = torch.tensor([end * pairs // ends[-1] for end in ends], device=device)
    stride = max(1, int(0.618 * num_tokens))
    while math.gcd(stride, num_tokens) > 1:
        stride += 1
    place_T = torch.arange(num_tokens, device=device) * stride % max(1, num_tokens)
    place_TK = place_T[:, None] + num_tokens * torch.arange(config.top_k, device=device)
    return torch.searchsorted(end_E, place_TK, right=True, out_int32=True)


def decode(given_TK: torch.Tensor) -> torch.Tensor:
    """Return the experts of choices, rejected ones too; -1 for none."""
    return torch.where(given_TK < -1, -2 - given_TK, given_TK)


def encode(expert_TK: torch.Tensor, rejected_TK: torch.Tensor | None) -> torch.Tensor:
    """Return choices with rejected experts marked."""
    if rejected_TK is None:
        return expert_TK
    return torch.where(rejected_TK & (expert_TK >= 0), -2 - expert_TK, expert_TK)


def key_of_given(
    expert_TK: torch.Tensor,
    score_TE: torch.Tensor,
    key_TE: torch.Tensor | None,
    gumbel_TE: torch.Tensor | None,
) -> torch.Tensor:
    """Return keys whose largest are the given experts in their order; others keep their order.

    The others' order is that of the keys (None: scores) with noise. Selecting by a key makes a
    replay the same computation as the recorded run; a gather would not.
    """
    key_TE = score_TE.detach() if key_TE is None else key_TE
    key_TE = key_TE if gumbel_TE is None else key_TE + gumbel_TE
    top_k, (num_tokens, num_experts) = expert_TK.shape[1], key_TE.shape
    highest = torch.finfo(key_TE.dtype).max / torch.arange(
        2, top_k + 3, dtype=key_TE.dtype, device=key_TE.device
    )
    keys = torch.cat([key_TE.clamp(max=highest[-1]), key_TE.new_zeros(num_tokens, 1)], 1)
    column_TK = torch.where(expert_TK < 0, num_experts, expert_TK).long()  # the last for none
    return keys.scatter(1, column_TK, highest[:-1].expand(num_tokens, -1))[:, :-1].contiguous()


def in_given_places(
    expert_TK: torch.Tensor, found_TK: torch.Tensor, gate_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the selected experts and their gate values in the places of the given choices.

    They come by descending key, without the gaps of the given choices. Gaps get -1 and 0.
    """
    there_TK = expert_TK >= 0
    place_TK = (there_TK.cumsum(1) - 1).clamp(min=0)
    experts = torch.where(there_TK, found_TK.gather(1, place_TK), -1)
    return experts, torch.where(there_TK, gate_TK.gather(1, place_TK), 0)
