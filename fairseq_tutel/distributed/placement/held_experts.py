"""Which experts a state dict holds, where those of a layer are spread over ranks.

Every rank numbers its experts from 0. A small tensor beside them says which they are, so that what
one rank saved is not loaded into another; sets (:mod:`fairseq_tutel.checkpoint`) do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from .groups import ExpertParallelGroups

HELD = "experts_held"
_INSTEAD = (
    "fairseq_tutel.training.full_state_dict(model) has the experts of all ranks, "
    "load_full_state_dict gives each rank its own, save_checkpoint writes a set, and "
    "DistributedState is for torch.distributed.checkpoint"
)


class _Held(torch.Tensor):
    """Pickled as a plain tensor, for files of one rank. torch.distributed.checkpoint asks it what
    to write, and safetensors where its bytes are: by those, hosts write one file for all ranks.
    """

    def data_ptr(self):
        raise ValueError(
            f"a file of this state dict would hold {_text(self.tolist())} alone, as where rank 0 "
            f"saves for all (safetensors, save_pretrained, save_state): {_INSTEAD}"
        )

    def __create_write_items__(self, name: str, value: Any):
        raise ValueError(
            f"torch.distributed.checkpoint takes the different experts that ranks hold under one "
            f"name for one tensor ({name} names them): {_INSTEAD}"
        )

    def __deepcopy__(self, memo):
        return self.clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def held_experts(groups: ExpertParallelGroups) -> torch.Tensor | None:
    """int64 [5]: number of the first expert, how many, of how many (E), number of the slice, S.

    None where the rank has all experts whole, or is simulated.
    """
    if groups.simulated or groups.ep_size == groups.num_slices == 1:
        return None
    return torch.tensor(_held(groups)).as_subclass(_Held)


def pop_held_experts(
    state: MutableMapping[str, torch.Tensor], prefix: str, groups: ExpertParallelGroups
) -> None:
    """Remove :func:`held_experts` from a layer's state dict; ValueError if this rank has others.

    Also for all experts of a spread layer, of which every rank would take the first ones where a
    program loads with ``strict=False``.
    """
    held = state.pop(prefix + HELD, None)
    if held is None and groups.communicates:
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
    """A model's state dict as sets have it."""
    return {key: value for key, value in state.items() if key.split(".")[-1] != HELD}


def _held(groups: ExpertParallelGroups) -> list[int]:
    experts = groups.local_experts
    return [experts.start, len(experts), groups.num_experts, groups.slice_index, groups.num_slices]


def _text(held: list[int]) -> str:
    first, count, total, index, slices = held
    part = f"slice {index} of {slices} of " if slices > 1 else ""
    return f"{part}experts {first}..{first + count - 1} of {total}"
