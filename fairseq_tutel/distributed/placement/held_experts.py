"""Mark in a state dict that says which experts it holds, if experts are spread over ranks.

Every rank numbers its experts from 0. The mark is a small tensor that keeps one rank's experts from
being loaded into another rank. Sets (:mod:`fairseq_tutel.checkpoint`) do not have it.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ...backends._torch_private import RefusesFiles
from .groups import ExpertParallelGroups

HELD = "experts_held"
_INSTEAD = (
    "fairseq_tutel.training.full_state_dict(model) has the experts of all ranks, "
    "load_full_state_dict gives each rank its own, save_checkpoint writes a set, and "
    "DistributedState is for torch.distributed.checkpoint"
)


class _Held(RefusesFiles):
    """Mark that refuses files in which one rank's experts would stand for all."""

    def refusal(self, name: str | None) -> str:
        if name is None:
            return (
                "if rank 0 saves for all (safetensors, save_pretrained, save_state), the file "
                f"holds only {_text(self.tolist())}: {_INSTEAD}"
            )
        return (
            f"torch.distributed.checkpoint takes the different experts that ranks hold under one "
            f"name for one tensor ({name} names them): {_INSTEAD}"
        )


def held_experts(groups: ExpertParallelGroups) -> torch.Tensor | None:
    """Return the mark: int64 [5] with first expert, local experts, E, slice number and S.

    Return None if the rank holds all experts whole, or is simulated.
    """
    if groups.simulated or groups.ep_size == groups.num_slices == 1:
        return None
    return torch.tensor(_held(groups)).as_subclass(_Held)


def pop_held_experts(
    state: MutableMapping[str, torch.Tensor],
    prefix: str,
    groups: ExpertParallelGroups,
    own: Iterable[str] = (),
) -> None:
    """Remove the mark of :func:`held_experts` from a layer's state dict.

    Raise ValueError for other experts than this rank's, for all experts of a layer that is spread
    over ranks, and without the mark for a part of the tensors ``own`` of one's own experts, such as
    peft's adapters. With ``strict=False`` torch would load the first ones silently.
    """
    held = state.pop(prefix + HELD, None)
    if held is None and groups.communicates:
        found = [f"{prefix}experts.{name}" in state for name in own]
        if any(found) and not all(found):
            raise ValueError(
                f"{prefix}experts: the state dict has a part of the experts' tensors and does not "
                "say of which experts: use fairseq_tutel.training.load_full_state_dict(model, "
                "state, strict=False) with the experts of all ranks"
            )
        beyond = f"{prefix}experts.{groups.num_local_experts}."
        if any(key.startswith(beyond) for key in state):
            raise ValueError(
                f"{prefix}experts: the state dict has more experts than the {_text(_held(groups))} "
                f"of this rank: {_INSTEAD}"
            )
    if held is not None and held.tolist() != _held(groups):
        raise ValueError(
            f"{prefix}{HELD}: the state dict has {_text(held.tolist())}, but this rank holds "
            f"{_text(_held(groups))}: {_INSTEAD}"
        )


def without_held_experts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state dict without marks, as in sets."""
    return {key: value for key, value in state.items() if key.split(".")[-1] != HELD}


def _held(groups: ExpertParallelGroups) -> list[int]:
    experts = groups.local_experts
    return [experts.start, len(experts), groups.num_experts, groups.slice_index, groups.num_slices]


def _text(held: list[int]) -> str:
    first, count, total, index, slices = held
    part = f"slice {index} of {slices} of " if slices > 1 else ""
    return f"{part}experts {first}..{first + count - 1} of {total}"
