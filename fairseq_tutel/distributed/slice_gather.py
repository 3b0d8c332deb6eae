"""Whole experts out of their slices, on the ranks that write them to files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .gather import data_device
from .groups import ExpertParallelGroups
from .slices import slice_dim, whole_shape

_PIECE_BYTES = 1 << 25  # of one collective
_ALIGNMENT = 16  # of the pieces in a buffer, whatever their dtype


@dataclass(frozen=True)
class _Piece:
    """Some rows of one slice, and where they belong: in the wholes of all slices."""

    rows: torch.Tensor
    targets: list[torch.Tensor] | None


class SliceGather:
    """Joins the slices of this rank's experts on the rank with slice 0, a piece at a time.

    All memory is taken here, so that afterwards no rank can fail for want of it and leave the
    others waiting: that of the wholes, and of one piece per slice on the device that the ranks
    communicate from.

    Args:
        slices: by name in a state dict, each of any dtype and on any device, the same on all ranks
            of an expert, in the same order: parameters, or what is cut like them.
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
        self._dims = {}
        for name in slices:
            dim = slice_dim(name)
            if dim is None:
                raise ValueError(f"{name} is not in slices: every holder has all of it")
            self._dims[name] = dim
        self._wholes: dict[str, torch.Tensor] | None = None
        if groups.slice_index == 0:
            shapes = {n: whole_shape(p.shape, n, groups.num_slices) for n, p in slices.items()}
            self._wholes = {
                name: torch.empty(shapes[name], dtype=part.dtype, device=device)
                for name, part in slices.items()
            }
        sizes = [_bytes(piece.rows) for piece in self._pieces()]
        width = -(-max(sizes, default=0) // _ALIGNMENT) * _ALIGNMENT
        count = 1 + (groups.num_slices if self._wholes is not None else 0)
        self._buffers = torch.empty(
            (count, width), dtype=torch.uint8, device=data_device(groups.replica_group)
        )

    def run(self) -> dict[str, torch.Tensor] | None:
        """The whole tensors by name on the rank with slice 0, None elsewhere. Collective."""
        send, *receive = self._buffers
        first = self._groups.rank % self._groups.ep_size  # of the world
        for piece in self._pieces():
            size = _bytes(piece.rows)
            _as(send, piece.rows).copy_(piece.rows)
            parts = [buffer[:size] for buffer in receive] or None
            dist.gather(send[:size], parts, dst=first, group=self._groups.replica_group)
            for buffer, target in zip(receive, piece.targets or (), strict=True):
                target.copy_(_as(buffer, piece.rows))
        return self._wholes

    def _pieces(self) -> Iterator[_Piece]:
        for name, part in self._slices.items():
            part, dim = part.detach(), self._dims[name]
            step = max(1, _PIECE_BYTES // max(1, _bytes(part[:1])))
            for start in range(0, part.shape[0], step):
                targets = None
                if self._wholes is not None:
                    of_slices = self._wholes[name].split(part.shape[dim], dim)
                    targets = [one[start : start + step] for one in of_slices]
                yield _Piece(part[start : start + step], targets)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The beginning of a buffer of bytes as a tensor of another one's dtype and shape."""
    return buffer[: _bytes(like)].view(like.dtype).view(like.shape)
