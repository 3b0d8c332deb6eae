"""A language model with experts, read from a checkpoint piece by piece.

Sets and merged files of this package and of Meta's branch ``moe``. Weights are mapped from the
files, one expert at a time, and checked for damage as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoint import read_set, split_key
from .description import ModelDescription
from .errors import ExportError
from .names import Place, is_no_weight, place_in_model
from .options import StoredOptions, read_options


class Piece(NamedTuple):
    """A run of an exported tensor's elements, those from ``start`` on."""

    name: str
    start: int
    values: torch.Tensor


class ModelSource:
    """An open checkpoint.

    Attributes:
        path: what was opened.
        options: of the model and its task, as stored.
        description: the model.
        shapes, dtypes: of the exported tensors, by name.

    Raises:
        ExportError: it holds something that cannot be exported.
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._reader = read_set(self.path)
        shared = self._reader.shared_state(with_optimizer=False)
        if not self._reader.num_experts:
            raise ExportError(f"{path}: has no experts; dense models of fairseq are not exported")
        self.options: StoredOptions = read_options(shared, self._reader.num_experts, self.path)
        self._dense = shared["model"]
        self.description: ModelDescription = self.options.describe(self._dense)
        self.shapes = self.description.shapes()
        self.dtypes = self._check()

    def pieces(self) -> Iterator[Piece]:
        """All elements of all tensors, mapped; those of one expert are open at a time."""
        for key, values in self._dense.items():
            if place := self._place(key):
                yield Piece(*place, values)
        for expert in range(self._reader.num_experts):
            tensors, _ = self._reader.experts(range(expert, expert + 1), with_optimizer=False)
            for key, values in tensors.items():
                prefix, _, rest = split_key(key)
                yield Piece(*self._place(f"{prefix}{expert}{rest}"), values)

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """All tensors in memory whose names begin so, without that, to be computed with here."""
        found = {
            name: torch.empty(shape, dtype=self.dtypes[name])
            for name, shape in self.shapes.items()
            if name.startswith(prefix)
        }
        for name, start, values in self.pieces():
            if name in found:
                found[name].view(-1)[start : start + values.numel()] = values.reshape(-1)
        return {name.removeprefix(prefix): values for name, values in found.items()}

    def _place(self, key: str) -> Place | None:
        """Of a stored tensor; None for what is no weight, or the embedding under its other name."""
        if is_no_weight(key):
            return None
        place = place_in_model(key, self.description.moe)
        if place is None:
            raise ExportError(f"{self.path}: {key} has no place in an exported model")
        return None if self.description.tied and place.name == "lm_head.weight" else place

    def _check(self) -> dict[str, torch.dtype]:
        """Every stored tensor has a place of its size, and every place is filled. Returns dtypes.

        The experts of a set are alike, which its reader ensures: the first stands for all.
        """
        dtypes: dict[str, torch.dtype] = {}
        filled = dict.fromkeys(self.shapes, 0)
        tensors, _ = self._reader.experts(range(1), with_optimizer=False)
        for key, values in (self._dense | tensors).items():
            place = self._place(key)
            if place is None:
                continue
            if place.name not in self.shapes:
                raise ExportError(f"{self.path}: {key} has no place in an exported model")
            copies = self._reader.num_experts if key in tensors else 1
            filled[place.name] += values.numel() * copies
            if dtypes.setdefault(place.name, values.dtype) != values.dtype:
                raise ExportError(
                    f"{self.path}: {key} is {values.dtype}, others of its kind {dtypes[place.name]}"
                )
        for name, shape in self.shapes.items():
            if filled[name] != torch.Size(shape).numel():
                raise ExportError(
                    f"{self.path}: {name} should have {torch.Size(shape).numel()} numbers "
                    f"({list(shape)}), and the checkpoint has {filled[name]}"
                )
        return dtypes


def layer_prefix(source: ModelSource, number: int) -> str:
    """Of the names of an MoE layer's tensors. Raises ExportError for a layer without experts."""
    sparse = source.description.moe_layers
    if number not in sparse:
        raise ExportError(
            f"{source.path}: layer {number} has no experts; those that have: "
            f"{', '.join(map(str, sparse))}"
        )
    return f"model.layers.{number}.moe."
