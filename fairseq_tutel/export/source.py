"""A model with experts, read from a checkpoint in the form that it has in transformers.

Weights are mapped from the files, one expert at a time, and checked when they are first read.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from ..checkpoint import read_set, split_key
from ..checkpoint.folders import Place, is_no_weight
from .errors import ExportError
from .language_model import LanguageModel
from .nllb import Nllb
from .options import StoredOptions, read_options

# Architectures of fairseq -> what they become. A form has the exported tensors' ``shapes``, the
# stored ``tensors`` with their places in them, ``copies`` (stored tensors that repeat the
# ``embedding``), and the files of a folder: ``json_files``, ``code`` and those of the tokenizer.
FORMS = {"transformer_lm_gpt_moe": LanguageModel, "transformer_moe": Nllb}


class ModelSource:
    """An open checkpoint; ExportError if it holds something that cannot be exported.

    ``options`` are those of model and task, ``form`` and ``config`` describe the exported model,
    ``shapes`` and ``dtypes`` its tensors by name.
    """

    def __init__(self, path: str | Path, architectures: Collection[str] = FORMS.keys()):
        self.path = str(path)
        self._reader = read_set(self.path)
        shared = self._reader.shared_state(with_optimizer=False)
        if not self._reader.num_experts:
            raise ExportError(f"{path}: has no experts; dense models of fairseq are not exported")
        self.options: StoredOptions = read_options(
            shared, self._reader.num_experts, self.path, architectures
        )
        self._dense = shared["model"]
        self.form = FORMS[self.options.architecture](self.options, self._dense)
        self.config = self.form.config
        self.shapes = self.form.shapes
        self.dtypes: dict[str, torch.dtype] = {}
        self._experts_in: defaultdict[str, set[int]] = defaultdict(set)  # by exported tensor
        self._checked: set[int] = set()
        self._check()

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return these tensors in memory."""
        found = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        experts = sorted({expert for name in names for expert in self._experts_in[name]})
        for (name, start), values in self._pieces(experts):
            if name in found:
                found[name].view(-1)[start : start + values.numel()] = values.reshape(-1)
        return found

    def names_in_layer(self, number: int) -> dict[str, str]:
        """Return names in an MoE layer by names in the model; ExportError for a dense layer."""
        sparse = self.config.moe_layers
        if number not in sparse:
            known = ", ".join(map(str, sparse))
            raise ExportError(f"{self.path}: layer {number} has no experts; give one of {known}")
        prefix = f"model.layers.{number}.moe."
        return {name: name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)}

    def _pieces(self, experts: Iterable[int]) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield all dense elements and those of some experts, mapped, one expert after another."""
        for key, values in self._dense.items():
            if place := self._place(key):
                yield place, values
        for expert in experts:
            self._reader.check_experts = expert not in self._checked
            tensors, _ = self._reader.experts(range(expert, expert + 1), with_optimizer=False)
            self._checked.add(expert)
            for key, values in tensors.items():
                prefix, _, rest = split_key(key)
                yield self._place(f"{prefix}{expert}{rest}"), values

    def _place(self, key: str) -> Place | None:
        """Return the place of a stored tensor; None for no weight and for a tied copy."""
        if is_no_weight(key) or key in self.form.copies:
            return None
        if key not in self.form.tensors:
            raise ExportError(f"{self.path}: {key} has no place in an exported model")
        return self.form.tensors[key].place

    def _check(self) -> None:
        """Check that stored tensors fill all places; note dtypes and experts."""
        filled = dict.fromkeys(self.shapes, 0)
        stored = dict(self._dense)
        # the reader ensures that experts are alike: the first stands for all
        tensors, _ = self._reader.experts(range(1), with_optimizer=False)
        for key, values in tensors.items():
            prefix, _, rest = split_key(key)
            stored |= {f"{prefix}{n}{rest}": values for n in range(self._reader.num_experts)}
        for key, values in stored.items():
            place = self._place(key)
            if place is None:
                continue
            filled[place.name] += values.numel()
            if expert := split_key(key):
                self._experts_in[place.name].add(expert[1])
            known = self.dtypes.setdefault(place.name, values.dtype)
            if known != values.dtype:
                raise ExportError(f"{self.path}: {key} is {values.dtype}, others are {known}")
        for name, shape in self.shapes.items():
            if filled[name] != shape.numel():
                found = f"{filled[name]} numbers, not {shape.numel()} ({list(shape)})"
                raise ExportError(f"{self.path}: {name} has {found}")
