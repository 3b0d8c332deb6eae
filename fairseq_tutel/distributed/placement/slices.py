"""Slices of an expert: the part of each tensor that a rank holds under the placement ``sliced``.

The F hidden units of an expert are cut into S contiguous slices of F/S units. A slice has the rows
of fc1's weight and bias, and the columns of fc2's weight, that belong to its units. Tensors without
hidden units, such as fc2's bias, are whole on every rank of the expert. Each network of experts
declares how its tensors are cut.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..world import data_device
from .groups import ExpertParallelGroups

_SLICE_DIMS: dict[str, int | None] = {}
_ALIGNMENT = 16  # bytes; a piece of any dtype can begin at a multiple


def declare_slices(dims: Mapping[str, int | None]) -> None:
    """Declare how tensors are cut, by the last two words of their names (``fc1.weight``).

    Raise ValueError if another network cuts its tensor of this name differently.
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
    """Return the dimension along which one expert's tensor is cut; None if it is not cut.

    ``name`` is a name in a state dict, with any prefix. Copies and moments are cut like their
    parameters. Raise ValueError if no network declared a tensor of this name.
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
    """Return the shape of the whole tensor whose slice has the shape ``part``."""
    dim, shape = slice_dim(name), list(part)
    if dim is not None:
        shape[dim] *= count
    return torch.Size(shape)


def slice_size(hidden_dim: int, count: int) -> int:
    """Return F/S; raise ValueError if F is not a multiple of S."""
    if hidden_dim % count:
        raise ValueError(
            f"the {hidden_dim} hidden units of an expert cannot be cut into {count} slices, one "
            f"for each of its ranks: choose a multiple of {count}, or placement='replicated' "
            "(--moe-expert-placement)"
        )
    return hidden_dim // count


class SliceGather:
    """Gather of slices: joins a rank's experts on the rank with slice 0, a piece at a time.

    The constructor allocates all memory, so that no rank runs out of it while others wait: the
    whole tensors, and one piece per slice on the device of the process group.

    All ranks of an expert pass matching ``slices`` in the same order: parameters, or tensors cut
    like them, by name in a state dict. The whole tensors are made on ``device``. ValueError is
    raised for a tensor that is not cut.
    """

    piece_bytes = 1 << 25  # of one collective

    def __init__(
        self,
        slices: Mapping[str, torch.Tensor],
        groups: ExpertParallelGroups,
        device: torch.device | str = "cpu",
    ):
        self._groups = groups
        self._wholes: dict[str, torch.Tensor] | None = None
        self._slices: list[tuple[str, torch.Tensor, int]] = []
        for name, part in slices.items():
            dim = slice_dim(name)
            if dim is None:
                raise ValueError(f"{name} is not in slices: every holder has all of it")
            self._slices.append((name, part.detach(), dim))
        if groups.slice_index == 0:
            self._wholes = {}
            for name, part in slices.items():
                shape = whole_shape(part.shape, name, groups.num_slices)
                self._wholes[name] = torch.empty(shape, dtype=part.dtype, device=device)
        sizes = [rows.nbytes for rows, _ in self._pieces()]
        width = -(-max(sizes, default=0) // _ALIGNMENT) * _ALIGNMENT
        count = 1 + (groups.num_slices if self._wholes is not None else 0)
        self._buffers = torch.empty(
            (count, width), dtype=torch.uint8, device=data_device(groups.replica_group)
        )

    def run(self) -> dict[str, torch.Tensor] | None:
        """Return the whole tensors by name on the rank with slice 0, else None. Collective."""
        send, *receive = self._buffers
        first = self._groups.rank % self._groups.ep_size  # global rank that has slice 0
        for rows, targets in self._pieces():
            size = rows.nbytes
            _as(send, rows).copy_(rows)
            parts = [buffer[:size] for buffer in receive] or None
            dist.gather(send[:size], parts, dst=first, group=self._groups.replica_group)
            for buffer, target in zip(receive, targets, strict=True):
                target.copy_(_as(buffer, rows))
        return self._wholes

    def _pieces(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield rows of this slice; on the rank with slice 0 also every slice's place for them."""
        for name, part, dim in self._slices:
            step = max(1, self.piece_bytes // max(1, part[:1].nbytes))
            for start in range(0, part.shape[0], step):
                targets = []
                if self._wholes is not None:
                    of_slices = self._wholes[name].split(part.shape[dim], dim)
                    targets = [one[start : start + step] for one in of_slices]
                yield part[start : start + step], targets


def _as(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a buffer of bytes as a tensor of ``like``'s dtype and shape."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
