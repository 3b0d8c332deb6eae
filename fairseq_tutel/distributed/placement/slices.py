"""Slices of an expert: which part of which tensor a rank holds under the placement ``sliced``.

The hidden units of an expert are cut into S neighbouring parts of F/S. Slice s has what belongs to
its units: rows of fc1's weight and bias, columns of fc2's weight. What belongs to no unit, such as
fc2's bias, every holder has. A network of experts declares how its tensors are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..world import data_device
from .groups import ExpertParallelGroups

_SLICE_DIMS: dict[str, int | None] = {}
_PIECE_BYTES = 1 << 25  # of one collective
_ALIGNMENT = 16  # of the pieces in a buffer, whatever their dtype


def declare_slices(dims: Mapping[str, int | None]) -> None:
    """Say how tensors are cut, by the last two words of their names (``fc1.weight``). Raises
    ValueError where another network's tensor of this name is cut otherwise.
    """
    for end, dim in dims.items():
        if end.count(".") != 1:
            raise ValueError(f"an expert's tensor is named LAYER.KIND, such as fc1.weight: {end!r}")
        if _SLICE_DIMS.setdefault(end, dim) != dim:
            raise ValueError(
                f"{end!r} of another network is cut along dimension {_SLICE_DIMS[end]}, not {dim}: "
                "give the tensor another name"
            )


def slice_dim(name: str) -> int | None:
    """The dimension along which one expert's tensor is cut; None where every holder has all of it.

    ``name``: in a state dict, with any prefix; copies and moments are cut like their parameters.
    Raises ValueError for what is no tensor of a network that was declared.
    """
    end = ".".join(name.split(".")[-2:])
    if end not in _SLICE_DIMS:
        raise ValueError(f"{name} is no tensor of an expert that can be in slices")
    return _SLICE_DIMS[end]


def take_slice(whole: torch.Tensor, name: str, index: int, count: int) -> torch.Tensor:
    """Return slice ``index`` of ``count`` of one expert's tensor; a view.

    >>> import torch
    >>> import fairseq_tutel.moe  # the networks of experts say how their tensors are cut
    >>> take_slice(torch.zeros(16, 4), "experts.0.fc1.weight", 1, 2).shape
    torch.Size([8, 4])

    Args:
        whole (Tensor): [F, M], [F], [M, F] or [M].
        name (str): name of the tensor in a state dict, with any prefix.
        index (int): number of the slice, from 0.
        count (int): S, the number of slices.

    Raises:
        ValueError: F is not a multiple of S.
    """
    dim = slice_dim(name)
    if dim is None or count == 1:
        return whole
    size = slice_size(whole.shape[dim], count)
    return whole.narrow(dim, index * size, size)


def whole_shape(part: Sequence[int], name: str, count: int) -> torch.Size:
    """Shape of the whole of which a slice has the shape ``part``; see :func:`take_slice`."""
    dim, shape = slice_dim(name), list(part)
    if dim is not None:
        shape[dim] *= count
    return torch.Size(shape)


def slice_size(hidden_dim: int, count: int) -> int:
    """F/S; ValueError where F is not a multiple of S."""
    if hidden_dim % count:
        raise ValueError(
            f"the {hidden_dim} hidden units of an expert cannot be cut into {count} slices, one "
            f"for each of its ranks: choose a multiple of {count}, or placement='replicated' "
            "(--moe-expert-placement)"
        )
    return hidden_dim // count


class SliceGather:
    """Joins the slices of this rank's experts on the rank with slice 0, a piece at a time.

    All memory is taken here, so that afterwards no rank can fail for want of it and leave others
    waiting: that of the wholes, and of a piece per slice on the device the ranks communicate from.

    Args:
        slices: parameters, or what is cut like them, by name in a state dict, of any dtype and
            device; the same in the same order on all ranks of an expert.
        groups: with ``num_slices`` > 1.
        device: of the wholes.

    Raises:
        ValueError: a name stands for no tensor that is cut.
    """

    def __init__(
        self,
        slices: Mapping[str, torch.Tensor],
        groups: ExpertParallelGroups,
        device: torch.device | str = "cpu",
    ):
        self._groups = groups
        self._slices = slices
        self._wholes: dict[str, torch.Tensor] | None = None
        for name in slices:
            if slice_dim(name) is None:
                raise ValueError(f"{name} is not in slices: every holder has all of it")
        if groups.slice_index == 0:
            self._wholes = {}
            for name, part in slices.items():
                shape = whole_shape(part.shape, name, groups.num_slices)
                self._wholes[name] = torch.empty(shape, dtype=part.dtype, device=device)
        sizes = [_bytes(rows) for rows, _ in self._pieces()]
        width = -(-max(sizes, default=0) // _ALIGNMENT) * _ALIGNMENT
        count = 1 + (groups.num_slices if self._wholes is not None else 0)
        self._buffers = torch.empty(
            (count, width), dtype=torch.uint8, device=data_device(groups.replica_group)
        )

    def run(self) -> dict[str, torch.Tensor] | None:
        """The whole tensors by name on the rank with slice 0, None elsewhere. Collective."""
        send, *receive = self._buffers
        first = self._groups.rank % self._groups.ep_size  # of the world
        for rows, targets in self._pieces():
            size = _bytes(rows)
            _as(send, rows).copy_(rows)
            parts = [buffer[:size] for buffer in receive] or None
            dist.gather(send[:size], parts, dst=first, group=self._groups.replica_group)
            for buffer, target in zip(receive, targets, strict=True):
                target.copy_(_as(buffer, rows))
        return self._wholes

    def _pieces(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Some rows of one slice, and where they belong: in the wholes of all slices, if here."""
        for name, part in self._slices.items():
            part, dim = part.detach(), slice_dim(name)
            step = max(1, _PIECE_BYTES // max(1, _bytes(part[:1])))
            for start in range(0, part.shape[0], step):
                targets = []
                if self._wholes is not None:
                    of_slices = self._wholes[name].split(part.shape[dim], dim)
                    targets = [one[start : start + step] for one in of_slices]
                yield part[start : start + step], targets


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The beginning of a buffer of bytes as a tensor of another one's dtype and shape."""
    return buffer[: _bytes(like)].view(like.dtype).view(like.shape)
