"""Adapters of experts in the layout of peft, which vLLM reads, too: one matrix for all experts.

peft's ``target_parameters`` adapt the matrices of a module's experts. Those of gate and up are one
matrix there, with one A; LoRA here has an A for each. Files have ``EXPERTS.base_layer.lora_A`` for
the first projection and ``EXPERTS.lora_A`` for the second, A [E r, inputs] and B [outputs, r E]:
rows of A are grouped by expert, columns of B by number of the rank.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...training import lora
from ...training.lora import PREFIX
from .experts import Projections
from .restore import experts_of, layers_of

_SEPARATE = "separate_gate"  # in the header: A has rows of the gate, then rows of up


def save_adapters(
    path: str | os.PathLike[str], model: nn.Module, blocks: Mapping[str, nn.Module]
) -> None:
    """Save the updates of :func:`add_lora` as peft saves ``target_parameters``. Collective.

    ``PeftModel.from_pretrained`` reads the folder for the model of transformers, without this
    package. If the A of an expert's gate and up are the same, as those that peft trained, a file
    has the rank of the model. Otherwise it has twice the rank and alpha.

    Args:
        path (str or Path): the folder; it is made.
        model (nn.Module): a model with LoRA, wrapped or not.
        blocks (dict): result of :func:`replace_moe`.

    Raises:
        ValueError: the model has no LoRA, or trains something that the layout cannot hold.
    """
    layers = layers_of(lora.inside_peft(model), blocks, with_lora=True)
    updates, found = lora.gather_updates(model), {}
    for name, param in lora.inside_peft(model).named_parameters():
        if param.requires_grad and "lora_" not in name:
            raise ValueError(
                f"{name} is trained, too, and is no adapter: save_lora saves it, or freeze it"
            )
    bank: Any = next(iter(layers.values())).experts
    stacks = {
        name: _Stacks(name, block, layers[name].groups.num_experts)
        for name, block in blocks.items()
    }
    separate = bool(updates) and not all(each.has_one_a(updates) for each in stacks.values())
    for each in stacks.values() if updates else ():
        found |= each.join(updates, separate)
    factor = 1 + separate
    targets = {
        "target_modules": [],
        "target_parameters": sorted({name for each in stacks.values() for name in each.targets}),
    }
    header = {_SEPARATE: "true"} if separate else {}
    rank, alpha = factor * bank.rank, factor * bank.alpha
    alpha = int(alpha) if alpha.is_integer() else alpha  # as peft writes it
    lora.write_adapter(path, found, rank, alpha, targets, **header)


def load_adapters(
    path: str | os.PathLike[str], model: nn.Module, blocks: Mapping[str, nn.Module]
) -> list[str]:
    """Load updates of experts that peft or :func:`save_adapters` saved; not collective.

    A model without LoRA gets it, with the file's rank and alpha. Its other parameters are frozen.

    Args:
        path (str or Path): the folder.
        model (nn.Module): a model of :func:`replace_moe` on any number of ranks.
        blocks (dict): result of :func:`replace_moe`.

    Returns:
        list of str: the file's other tensors, such as adapters of attention, which are not loaded.

    Raises:
        ValueError: the adapter has several ranks or scales, or is not for these experts.
    """
    from safetensors import safe_open

    layers = layers_of(lora.inside_peft(model), blocks, with_lora=True)
    config = json.loads((Path(path) / lora.CONFIG).read_text(encoding="utf-8"))
    for option in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"):
        if config.get(option):
            raise ValueError(f"{path} has {option}={config[option]!r}, which LoRA here has not")
    found, used = {}, set()
    with safe_open(Path(path) / lora.WEIGHTS, "pt") as file:
        separate = _SEPARATE in (file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    factor = 1 + separate
    rank, alpha = config["r"] // factor, config["lora_alpha"] / factor
    for name, block in blocks.items():
        stacks = _Stacks(name, block, layers[name].groups.num_experts)
        if missing := [key for key in stacks.names() if key not in tensors]:
            raise ValueError(f"{path} lacks {missing[0]}: adapt both projections of the experts")
        found |= stacks.split(tensors, separate)
        used |= set(stacks.names())
    lora.put_updates(model, rank, alpha, found, found.__getitem__, path)
    return sorted(set(tensors) - used)


class _Stacks:
    """Adapters of one module of experts, by the names of both layouts."""

    def __init__(self, name: str, block: nn.Module, num_experts: int):
        experts = experts_of(block)
        self.layer, self.num_experts = name, num_experts
        self.experts = f"{name}.experts" if experts is not block else name
        self.up, self.down, *_, self.gated, self.interleaved = Projections.of(name, experts)
        first = "gate_up_proj" if self.gated else "up_proj"
        leaf = self.experts.rpartition(".")[2]
        self.targets = [f"{leaf}.{first}", f"{leaf}.down_proj"]

    def names(self) -> list[str]:
        """A and B of the first projection, then of the second."""
        places = (f"{PREFIX}{self.experts}{inside}" for inside in (".base_layer", ""))
        return [f"{place}.lora_{kind}.weight" for place in places for kind in "AB"]

    def _own(self, layer: str, kind: str) -> list[str]:
        """Names of all experts' A or B of a linear layer in :func:`save_lora`'s files."""
        experts = range(self.num_experts)
        return [lora.update_name(self.layer, each, f"{layer}.lora_{kind}") for each in experts]

    def has_one_a(self, updates: Mapping[str, Tensor]) -> bool:
        """Return whether gate and up have the same A in each expert."""
        pairs = zip(self._own("fc_gate", "A"), self._own("fc1", "A"), strict=True)
        return not self.gated or all(torch.equal(updates[a], updates[b]) for a, b in pairs)

    def join(self, updates: Mapping[str, Tensor], separate: bool) -> dict[str, Tensor]:
        """Return peft's four matrices, with twice the rank if gate and up have their own A."""

        def stacked(layer: str, kind: str) -> Tensor:
            return torch.stack([updates[name] for name in self._own(layer, kind)])

        a, b, down_a, down_b = (stacked(each, kind) for each in ("fc1", "fc2") for kind in "AB")
        if self.gated:
            gate_a, gate_b = (stacked("fc_gate", kind) for kind in "AB")
            if separate:
                a = torch.cat([gate_a, a], 1)
                none = torch.zeros_like(b)
                gate_b, b = torch.cat([gate_b, none], 2), torch.cat([none, b], 2)
            parts = torch.stack([gate_b, b], 2 if self.interleaved else 1)
            b = parts.flatten(1, 2)
        if separate:
            rank = down_a.shape[1]
            down_a = nn.functional.pad(down_a, (0, 0, 0, rank))
            down_b = nn.functional.pad(down_b, (0, rank))
        flat = [_flat(*each) for each in zip((a, b, down_a, down_b), "ABAB", strict=True)]
        return dict(zip(self.names(), flat, strict=True))

    def split(self, tensors: Mapping[str, Tensor], separate: bool) -> dict[str, Tensor]:
        """Return the tensors of single experts; raise ValueError for matrices of other shapes."""
        values = []
        for key, matrix in zip(self.names(), (self.up, self.up, self.down, self.down), strict=True):
            value, kind = tensors[key], key.rpartition(".lora_")[2][0]
            wanted = matrix.shape[2 if kind == "A" else 1]
            size, many = value.shape if kind == "B" else value.shape[::-1]
            if size != wanted or many % self.num_experts:
                raise ValueError(
                    f"{key} is {list(value.shape)}: it needs {wanted} and a multiple of "
                    f"{self.num_experts} experts; peft before 0.21 had them the other way round"
                )
            values.append(_single(value, kind, self.num_experts))
        a, b, down_a, down_b = values
        found = {"fc1": (a, b), "fc2": (down_a, down_b)}
        if self.gated:
            gate_b, up_b = (b[:, ::2], b[:, 1::2]) if self.interleaved else b.chunk(2, 1)
            gate_a, up_a = a.chunk(2, 1) if separate else (a, a)
            if separate:
                gate_b, up_b = gate_b.chunk(2, 2)[0], up_b.chunk(2, 2)[1]
            found |= {"fc_gate": (gate_a, gate_b), "fc1": (up_a, up_b)}
        if separate:
            found["fc2"] = down_a.chunk(2, 1)[0], down_b.chunk(2, 2)[0]
        return {
            name: value
            for layer, pair in found.items()
            for kind, values in zip("AB", pair, strict=True)
            for name, value in zip(self._own(layer, kind), values, strict=True)
        }


def _flat(value: Tensor, kind: str) -> Tensor:
    """Return A [E, r, inputs] or B [E, outputs, r] as peft's matrix."""
    return (value.flatten(0, 1) if kind == "A" else value.permute(1, 2, 0).flatten(1)).contiguous()


def _single(matrix: Tensor, kind: str, num_experts: int) -> Tensor:
    """Return peft's matrix as A [E, r, inputs] or B [E, outputs, r]."""
    if kind == "A":
        return matrix.unflatten(0, (num_experts, -1))
    return matrix.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
