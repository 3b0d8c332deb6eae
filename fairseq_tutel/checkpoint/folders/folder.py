"""Tensors, config and dictionary of a folder that transformers wrote or loads."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from ..layout import CheckpointError
from .tensors import Place

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
# symbols that every dictionary of fairseq begins with, and does not list
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class Folder:
    """Open folder. Its tensors are read one at a time, or in part.

    ``config`` and ``generation`` are the entries of ``config.json`` and ``generation_config.json``.
    CheckpointError is raised if files or safetensors are missing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"{path}: no folder of transformers, as it has no config.json")
        self.config = self._json("config.json")
        self.generation = self._json("generation_config.json")
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise CheckpointError("to read weights: pip install safetensors") from None
        index = self._json(_INDEX).get("weight_map")
        if index and not (
            isinstance(index, dict) and all(isinstance(name, str) for name in index.values())
        ):
            raise CheckpointError(f"{self.path / _INDEX}: 'weight_map' does not map names to files")
        files = sorted(set(index.values())) if index else [_ONE_FILE]
        if missing := [name for name in files if not (self.path / name).is_file()]:
            file = self.path / missing[0]
            raise CheckpointError(f"{file}: no such file; weights are read from safetensors alone")
        # mapped: nothing is read yet
        opened = []
        for name in files:
            try:
                opened.append(safe_open(self.path / name, "pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{self.path / name}: is damaged ({error})") from None
        # name -> (file, name in it)
        self._tensors = {name: (file, name) for file in opened for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> Set[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def join(self, name: str, others: Sequence[str]) -> None:
        """Drop the other names of a tied tensor: ``name`` alone stands for it, if it is stored."""
        there = [self._tensors.pop(each) for each in (name, *others) if each in self._tensors]
        if there:
            self._tensors[name] = there[0]

    def read(self, place: Place, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of this shape whose elements begin at a place."""
        part = self._slice(place.name)
        length, *rest = part.get_shape()
        row = torch.Size(rest).numel()
        count = torch.Size(shape).numel()
        if place.start + count > length * row:
            shape = f"{place.name} has the shape {part.get_shape()}"
            raise CheckpointError(f"{self.path}: {shape}, too small for the sizes in config.json")
        first = place.start // row
        rows = part[first : -(-(place.start + count) // row)].flatten()
        return rows[place.start - first * row :][:count].clone().view(shape)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor; CheckpointError unless it is floating point."""
        part = self._slice(name)
        if "F" not in part.get_dtype():  # F32, BF16, F8_E4M3 and so on
            raise CheckpointError(f"{self.path}: {name} is of {part.get_dtype()}, no weight")
        return torch.Size(part.get_shape())

    def _slice(self, name: str) -> Any:
        file, stored = self._tensors[name]
        return file.get_slice(stored)

    def symbols(self, count: int) -> list[str] | None:
        """Return the tokenizer's first ``count`` symbols; None if fairseq's do not come first."""
        try:
            known = self._symbols(count)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: tokenizer.json or vocab.json does not list symbols ({error})"
            ) from None
        return known if tuple(known[: len(SPECIAL)]) == SPECIAL else None

    def _symbols(self, count: int) -> list[str]:
        tokenizer, vocabulary = self._json("tokenizer.json"), self._json("vocab.json")
        if not isinstance(vocabulary, list):
            vocabulary = tokenizer.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, Mapping):
            found = {number: symbol for symbol, number in vocabulary.items()}
        else:  # with scores, in a model of unigrams
            symbols = (each if isinstance(each, str) else each[0] for each in vocabulary)
            found = dict(enumerate(symbols))
        found |= {each["id"]: each["content"] for each in tokenizer.get("added_tokens", ())}
        return [found.get(number, f"madeupword{number:04}") for number in range(count)]

    def languages(self) -> list[str]:
        """Return the languages whose tokens, such as ``__de__``, are in the tokenizer."""
        added = self._json("tokenizer.json").get("added_tokens", ())
        found = (re.fullmatch("__(.+)__", each["content"]) for each in added)
        return [match[1] for match in found if match]

    def _json(self, name: str) -> Any:
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: is no JSON ({error})") from None
        if not isinstance(content, dict) and name != "vocab.json":
            raise CheckpointError(f"{file}: holds a {type(content).__name__}, not a dict")
        return content
