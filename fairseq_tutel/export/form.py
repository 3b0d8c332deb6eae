"""Interface of the forms in which models stand in a folder of transformers."""

from __future__ import annotations

import abc
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.folders import Place
from .tokenizer import TokenizerFiles


class Form(abc.ABC):
    """A model's form in transformers: its tensors, where they come from, and its JSON files.

    The constructor takes the stored options and the weights without experts. It raises ExportError
    for an option that the form has no place for.
    """

    config: Any  # the model
    shapes: dict[str, torch.Size]  # of the exported tensors, by name
    embedding: str  # the tensor whose dtype is the model's
    copies: Collection[str] = ()  # tensors of a checkpoint that repeat the embedding
    code: tuple[str, ...] = ()  # Python files of the folder, without ".py"

    @abc.abstractmethod
    def place(self, key: str) -> Place | None:
        """Return the place of a tensor by its name in a checkpoint; None if it has none."""

    @abc.abstractmethod
    def json_files(self, dtype: str) -> dict[str, dict[str, Any]]:
        """Return ``config.json`` and ``generation_config.json``."""

    @abc.abstractmethod
    def symbols(self, tokenizer: TokenizerFiles) -> list[str]:
        """Return the dictionary; ExportError if it is not the model's."""

    @abc.abstractmethod
    def write_tokenizer(self, tokenizer: TokenizerFiles, folder: Path, symbols: list[str]) -> None:
        """Write the files of the tokenizer."""
