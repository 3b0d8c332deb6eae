"""A language model with experts, read from a checkpoint.

The checkpoint is a set or a merged file of this package, or one of Meta's branch ``moe``. Weights
are mapped from the files, one expert at a time, and checked for damage when they are first read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoint import read_set, split_key
from .description import ModelConfig
from .errors import ExportError
from .names import Place, is_no_weight, place_in_model
from .options import StoredOptions, read_options
from .twin import InferenceModel


class Piece(NamedTuple):
    """Elements of an exported tensor from ``start`` on."""

    name: str
    start: int
    values: torch.Tensor


class ModelSource:
    """An open checkpoint.

    Attributes:
        path: the checkpoint's name.
        options: options of the model and its task, as stored.
        config: the model.
        shapes, dtypes: of the exported tensors, by name.

    Raises:
        ExportError: the checkpoint holds something that cannot be exported.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._reader = read_set(self.path)
        shared = self._reader.shared_state(with_optimizer=False)
        if not self._reader.num_experts:
            raise ExportError(f"{path}: has no experts; dense models of fairseq are not exported")
        self.options: StoredOptions = read_options(shared, self._reader.num_experts, self.path)
        self._dense = shared["model"]
        self.config: ModelConfig = self.options.describe(self._dense)
        weights = InferenceModel(self.config).state_dict()
        self.shapes = {name: tensor.shape for name, tensor in weights.items()}
        self.dtypes = self._check()

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return these tensors in memory."""
        found = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        for name, start, values in self._pieces(any(".ffn_experts." in name for name in names)):
            if name in found:
                found[name].view(-1)[start : start + values.numel()] = values.reshape(-1)
        return found

    def names_in_layer(self, number: int) -> dict[str, str]:
        """Return names in an MoE layer by names in the model; ExportError for a dense layer."""
        sparse = self.config.moe_layers
        if number not in sparse:
            raise ExportError(
                f"{self.path}: layer {number} has no experts; those that have: "
                f"{', '.join(map(str, sparse))}"
            )
        prefix = f"model.layers.{number}.moe."
        return {name: name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)}

    def _pieces(self, with_experts: bool) -> Iterator[Piece]:
        """Yield all elements, mapped; the tensors of one expert are open at a time."""
        for key, values in self._dense.items():
            if place := self._place(key):
                yield Piece(*place, values)
        if not with_experts:
            return
        for expert in range(self._reader.num_experts):
            tensors, _ = self._reader.experts(range(expert, expert + 1), with_optimizer=False)
            for key, values in tensors.items():
                prefix, _, rest = split_key(key)
                yield Piece(*self._place(f"{prefix}{expert}{rest}"), values)
        self._reader.check_experts = False  # all of them have been checked

    def _place(self, key: str) -> Place | None:
        """Return the place of a stored tensor; None for no weight and for a tied projection."""
        if is_no_weight(key):
            return None
        place = place_in_model(key, self.config)
        if place is None:
            raise ExportError(f"{self.path}: {key} has no place in an exported model")
        tied = self.config.tie_word_embeddings and place.name == "lm_head.weight"
        return None if tied else place

    def _check(self) -> dict[str, torch.dtype]:
        """Check that stored tensors have places of their sizes and fill all; return dtypes.

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
            if filled[name] != shape.numel():
                raise ExportError(
                    f"{self.path}: {name} should have {shape.numel()} numbers ({list(shape)}), and "
                    f"the checkpoint has {filled[name]}"
                )
        return dtypes
