"""Experts for evaluation only: held in fewer bytes, or in the pages of their file.

``mapped``: the tensors of the state dict, not copied. Those of a memory-mapped checkpoint are pages
of its file: an expert is read when the first token reaches it, processes of a node share its pages,
and the kernel can evict them. On another device than the CPU, the weights of the experts in use are
copied there for a call.

``bf16``: half of the bytes of fp32. ``int8``: a quarter; each row of a weight (an output) has a
scale, so that its largest value is 127. Biases are not changed. An expert with more than
:data:`_INT8_ROWS` rows is computed in bf16, because int8 products are faster only while reading the
weights takes most of the time.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..torch_modes import without_autocast
from .base import ExpertBank, ExpertRows, PreparedExperts
from .int8 import INT8_MULTIPLE, Int8, expert_ffn_int8
from .stacked import StackedExperts, fitting_tensors

STORAGES = ("stacked", "mapped", "bf16", "int8")
_INT8_ROWS = 16  # up to so many rows of an expert, int8 weights are faster than bf16


class InferenceExperts(ExpertBank):
    """Bank without parameters: its tensors come from a state dict.

    ``network``, a bank on the meta device, defines what the experts compute.
    """

    network: StackedExperts

    def __init__(self, network: StackedExperts, storage: str):
        super().__init__()
        if storage not in STORAGES[1:]:
            raise ValueError(f"expert_storage={storage!r}: expected one of {', '.join(STORAGES)}")
        vars(self)["network"] = network  # no child: a model would move and save its parameters
        self.storage = storage
        self.uses_activation = network.uses_activation
        self.expert_ids = network.expert_ids
        sizes = network.model_dim, network.hidden_dim
        self._whole = all(size % INT8_MULTIPLE == 0 for size in sizes)
        # by stacked parameter: a tuple of tensors (mapped), or a stack of them
        self._held: list[dict[str, Any]] = [{} for _ in network.expert_ids]

    def forward(self, batch: ExpertRows, prepared: PreparedExperts | None = None) -> torch.Tensor:
        """Compute the rows of each expert. NOTE: the host reads the counts of ragged rows."""
        if self.training or (torch.is_grad_enabled() and batch.rows.requires_grad):
            raise ValueError(
                f"experts that are held as {self.storage!r} have no gradients: they are for eval() "
                "and torch.no_grad()"
            )
        rows_RM = batch.rows.reshape(-1, batch.rows.shape[-1])
        if batch.offsets is None:
            size = batch.rows.shape[1]
            ends = [size * (number + 1) for number in range(batch.rows.shape[0])]
        else:
            ends = batch.offsets.tolist()
        out_RM = torch.empty_like(rows_RM)
        with without_autocast(rows_RM.device):
            for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
                if end > begin:
                    out_RM[begin:end] = self._one(expert, rows_RM[begin:end])
        out_RM[ends[-1] :] = 0
        return out_RM.view(batch.rows.shape)

    def _one(self, expert: int, rows_NM: torch.Tensor) -> torch.Tensor:
        """Compute the rows of one expert."""
        held, network = self._held[expert], self.network
        if not held:
            raise ValueError(
                f"experts, held as {self.storage!r}, have no weights until a state dict is loaded"
            )
        if self.storage == "mapped":
            params = [
                (values[0][None] if len(values) == 1 else torch.stack(values)).to(rows_NM)
                for values in held.values()
            ]
        else:
            half_NM = rows_NM.to(torch.bfloat16)
            fused = network.make_network((0.0, 0.0), 0)
            few = self.storage == "int8" and len(rows_NM) <= _INT8_ROWS
            if few and fused and self._whole:
                return expert_ffn_int8(half_NM, held, fused.options.activation).to(rows_NM.dtype)
            params = [value.to(torch.bfloat16) for value in held.values()]
        out_1NM = network.compute(PreparedExperts(tuple(params)), rows_NM.to(params[0])[None], None)
        return out_1NM[0].to(rows_NM.dtype)

    def hold(self, slot: int, name: str, values: Sequence[torch.Tensor]) -> None:
        """Hold the tensors of a stacked parameter of one local expert."""
        held: Any = tuple(value.detach() for value in values)
        if self.storage != "mapped":
            held = torch.stack(held)
        if self.storage == "bf16":
            held = held.to(torch.bfloat16)
        elif self.storage == "int8" and len(self.network.layout[name].dims) == 2:
            held = Int8.of(held)
        self._held[slot][name] = held

    def stacks(self) -> dict[str, Any]:
        """Return the tensors of all experts by stacked parameter; weights in int8 as Int8."""
        if self.storage == "mapped" or not all(self._held):
            why = "are pages of a file" if self.storage == "mapped" else "have no weights yet"
            raise ValueError(f"the experts, held as {self.storage!r}, {why}")
        stacks: dict[str, Any] = {}
        for name in self.network.layout:
            values = [held[name] for held in self._held]
            if isinstance(values[0], Int8):
                stacks[name] = Int8(*(torch.cat(parts) for parts in zip(*values, strict=True)))
            else:
                stacks[name] = torch.cat(values)
        return stacks

    def _apply(self, fn, recurse=True):
        device = fn(torch.empty(0)).device
        if self.storage == "int8" and device.type != "cpu":
            raise ValueError(f"experts in int8 are for CPUs, which have its product, not {device}")
        if self.storage == "bf16":  # others stay where they are
            if device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
                raise ValueError(f"experts in bf16: {device} has no such products")
            self._held = [{k: v.to(device) for k, v in held.items()} for held in self._held]
        return super()._apply(fn, recurse)

    def _names(self, slot: int):
        for name, stacked in self.network.layout.items():
            yield name, [f"{slot}.{single}" for single in stacked.names]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for slot, held in enumerate(self._held):
            for name, singles in self._names(slot):
                if name in held:
                    value = held[name]
                    parts = value.to(torch.bfloat16) if isinstance(value, Int8) else value
                    destination.update(zip((prefix + s for s in singles), parts, strict=True))

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        places = [(slot, *each) for slot in range(len(self._held)) for each in self._names(slot)]
        shapes = {
            single: getattr(self.network, name).shape[1:]
            for _, name, singles in places
            for single in singles
        }
        reports = missing_keys, unexpected_keys, error_msgs
        found = fitting_tensors(shapes, (0, 1), state_dict, prefix, strict, *reports)
        for slot, name, singles in places:
            if all(single in found for single in singles):
                self.hold(slot, name, [found[single] for single in singles])

    def num_bytes(self) -> int:
        """Return the bytes of the weights that are held; mapped ones are bytes of files."""
        values = [value for held in self._held for value in held.values()]
        tensors = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        return sum(tensor.nbytes for tensor in tensors)

    def extra_repr(self) -> str:
        return f"{self.storage}, {self.network.extra_repr()}"


def hold_experts(bank: ExpertBank, storage: str) -> InferenceExperts:
    """Return a bank for evaluation that holds the experts of a stacked bank in another form.

    The weights are copied (``mapped``: shared), so that the given bank can be freed. It has whole
    experts of a built-in or registered network. ``storage`` is ``mapped``, ``bf16`` or ``int8``,
    see :mod:`fairseq_tutel.moe.experts.inference`.
    """
    if not isinstance(bank, StackedExperts) or bank.hidden_slice[1] > 1:
        raise ValueError(
            f"expert_storage={storage!r} is for whole experts of a built-in network, not for "
            f"{type(bank).__name__} (slices: {bank.hidden_slice[1]})"
        )
    held = InferenceExperts(bank, storage)
    if not next(bank.parameters()).is_meta:
        for name, stacked in bank.layout.items():
            count = len(stacked.names)
            for slot, values in enumerate(getattr(bank, name).split(count)):
                held.hold(slot, name, values.unbind())
        vars(held)["network"] = bank.without_weights()
    return held.train(bank.training)
