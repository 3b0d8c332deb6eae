"""Low-rank updates (LoRA) of frozen experts. Hu et al. 2021, arXiv 2106.09685.

Every weight W of every expert becomes ``W + alpha / r * B @ A``, with r rows of A and r columns of
B. A and B are trained; W and the biases are not. W is held in its own dtype, in bf16 or in int8.

The forward pass adds the updates to the weights of one layer at a time, in fp32 (fp64 for fp64),
and rounds the sums once, to the rows' dtype. They are computed again in the backward pass and never
kept. Gradients of A and B take products with r columns.

This saves nothing for networks other than ffn, swiglu and geglu, for slices, and if weights travel:
autograd then keeps the sums until the backward pass, and computes whole gradients of them. Experts
whose calls somebody observes (hooks) are computed again as a whole.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ... import ops
from ...backends._torch_private import set_parameters
from ...distributed import declare_slices
from ..torch_modes import without_autocast
from .base import ExpertBank, PreparedExperts
from .inference import InferenceExperts
from .int8 import Int8
from .network import FusedNetwork
from .stacked import Stacked, StackedExperts

LORA_STORAGES = ("same", "bf16", "int8")
_SCALE = "_scale"  # ending of the buffer with the scales of an int8 weight


class LoRAExperts(StackedExperts):
    """Bank of frozen experts with trained low-rank updates.

    State dicts have the names of the experts without updates, and ``{j}.fc1.lora_A`` [r, M] and
    ``{j}.fc1.lora_B`` [F, r] for each weight. A state dict without any update leaves the updates as
    they are. Weights in int8 are saved in bf16.

    ``storage`` is how frozen weights are held; without one, those of ``base`` are shared.
    :func:`fairseq_tutel.training.add_lora` explains the other arguments.
    """

    network: StackedExperts  # defines what the experts compute

    def __init__(
        self,
        base: ExpertBank,
        rank: int,
        alpha: float,
        storage: str = "same",
        seed: int | None = None,
    ):
        ExpertBank.__init__(self)
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank > 0
        if not (whole and isinstance(alpha, int | float) and 0 < alpha < math.inf):
            raise ValueError(
                f"rank={rank!r}, alpha={alpha!r}: give a whole number and a finite number > 0"
            )
        if storage not in LORA_STORAGES:
            raise ValueError(f"storage={storage!r}: choose one of {', '.join(LORA_STORAGES)}")
        self.memory = base.memory
        network, frozen = _frozen(base, storage)
        # on the meta device; no child: a model would move and save its parameters
        vars(self)["network"] = network
        self.rank, self.alpha, self.storage = rank, float(alpha), storage
        for name in ("options", "expert_ids", "activation", "activation_dropout", "dropout",
                     "draw_on_cpu", "model_dim", "hidden_dim", "hidden_slice", "num_holders",
                     "uses_activation"):  # fmt: skip
            setattr(self, name, getattr(network, name))
        self.layout = dict(network.layout)
        for name, value in frozen.items():
            if isinstance(value, Int8):
                self.register_buffer(name + _SCALE, value.scale, persistent=False)
                value = value.value
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        for name, weight in network.layout.items():
            if len(weight.dims) == 2:
                outputs, inputs = weight.dims
                layers = [single.rpartition(".")[0] for single in weight.names]
                a, b = self._factor_names(name)
                like = getattr(self, name)
                self._add(a, Stacked(f"r{inputs}", *(f"{x}.lora_A" for x in layers), r=rank), like)
                self._add(b, Stacked(f"{outputs}r", *(f"{x}.lora_B" for x in layers), r=rank), like)
        self.mark()
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        self.reset_updates(seed)
        self.train(base.training)

    def _add(self, name: str, factor: Stacked, weight: torch.Tensor) -> None:
        """Add A or B of a stacked weight, in fp32 (fp64 for fp64) on its device."""
        declare_slices(dict.fromkeys(factor.names, factor.slice_dim))
        self.layout[name] = factor
        shape = factor.shape(self.model_dim, self.hidden_dim // self.hidden_slice[1])
        values = torch.zeros((len(weight), *shape), device=weight.device)
        self.register_parameter(
            name, nn.Parameter(values.to(torch.promote_types(weight.dtype, torch.float32)))
        )

    @staticmethod
    def _factor_names(weight: str) -> tuple[str, str]:
        """Return the names of A and B of a stacked weight."""
        stem = weight.removesuffix("_weight")
        return f"{stem}_lora_A", f"{stem}_lora_B"

    @property
    def updates(self) -> dict[str, nn.Parameter]:
        """The trained parameters, A [e*n, r, ...] and B [e*n, ..., r] of each weight, by name."""
        names = [name for name, stacked in self.layout.items() if "r" in stacked.dims]
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def reset_updates(self, seed: int) -> None:
        """Set B to zero, and draw A of each expert by its global index and ``seed``."""
        for name, factor in self.updates.items():
            factor.zero_()
            if name.endswith("lora_A"):
                self.reset_parameters(seed, [name])

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of the bank: those of ``layout``, then the scales of int8 weights."""
        self._refuse_reparametrized()
        return (*(getattr(self, name) for name in self.layout), *self.buffers())

    def sums(self, held: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the network's parameters, from :meth:`held`, with their updates in ``dtype``."""
        found = dict(zip([*self.layout, *self._buffers], held, strict=True))
        wide, params = torch.promote_types(dtype, torch.float32), []
        with without_autocast(held[0].device):
            for name in self.network.layout:
                names, value = self._factor_names(name), found[name]
                if name + _SCALE in found:
                    value = Int8(value, found[name + _SCALE]).to(wide)
                if names[0] in found:
                    a, b = (found[factor].to(wide) for factor in names)
                    value = torch.baddbmm(value.to(wide), b, a, alpha=self.alpha / self.rank)
                params.append(value.to(dtype))
        return tuple(params)

    def prepare(self, dtype, parallelism=None, travels=False):
        if travels or not (parallelism is None or parallelism.is_replicated):
            return self._summed(self.sums(self.held(), dtype)).prepare(dtype, parallelism, travels)
        dropout = (self.activation_dropout, self.dropout) if self.training else (0.0, 0.0)
        held, inner, network = self.held(), self.make_network(dropout, 0), None
        is_frozen = not any(each.requires_grad for each in held[: len(self.network.layout)])
        if isinstance(inner, FusedNetwork) and is_frozen:  # nobody has unfrozen weights
            network = LowRankNetwork(self, inner)
        return PreparedExperts(held, dropout, network=network)

    def make_network(self, dropout, part):
        return self.network.make_network(dropout, part)

    def _summed(self, params: Sequence[torch.Tensor]) -> StackedExperts:
        """Return the network with these tensors as its parameters."""
        bank: Any = copy.copy(self.network)
        set_parameters(bank, dict(zip(bank.layout, params, strict=True)))
        bank.training = self.training
        return bank

    def compute(self, prepared, rows, offsets):
        if len(prepared.params) == len(self.network.layout):  # summed before they travelled
            return self.network.compute(prepared, rows, offsets)

        def summed(held):
            params = self.sums(held, rows.dtype)
            return self.network.compute(prepared._replace(params=params), rows, offsets)

        return checkpoint(summed, prepared.params, use_reentrant=False)

    def factor_gradients(
        self, held: Sequence[torch.Tensor], chunk: ops.Pending
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of :attr:`updates` of a fused network by name, from one chunk.

        Four products per expert have r rows or columns each. None is as large as a weight's.
        """
        found, offsets = dict(zip(self.layout, held, strict=False)), chunk.rows.offsets
        lead, gradients = chunk.rows.values.shape[:-1], {}
        for name, d, inputs in (
            ("fc1_weight", chunk.d_hidden, chunk.rows.values),
            ("fc2_weight", chunk.d_out, chunk.active),
        ):
            d, inputs = (each.reshape(*lead, each.shape[-1]) for each in (d, inputs))
            names, parts = self._factor_names(name), len(self.layout[name].names)
            a, b = (_joined(found[each].to(d.dtype), parts, each) for each in names)
            b = b * (self.alpha / self.rank)
            d_a = ops.weight_gradient(ops.rows_product(d, b, offsets), inputs, offsets)
            d_b = ops.weight_gradient(d, ops.rows_product(inputs, a.mT, offsets), offsets)
            gradients[names[0]] = d_a.view_as(found[names[0]])
            gradients[names[1]] = _parted(d_b, parts) * (self.alpha / self.rank)
        return gradients

    @torch.no_grad()
    def merged(self) -> StackedExperts:
        """Return the experts with their updates added to the weights, without LoRA.

        Weights keep their dtype; weights in int8 become bf16.
        """
        held = self.held()
        wide = torch.promote_types(held[0].dtype, torch.float32)
        bank = self._summed(self.sums(held, wide))
        for name, own in zip(bank.layout, held, strict=False):
            dtype = own.dtype if own.is_floating_point() else torch.bfloat16
            param = getattr(bank, name).to(dtype)
            bank.register_parameter(name, nn.Parameter(param, requires_grad=False))
        bank.mark()
        return bank

    def kept_per_row(self, model_dim):
        return self.network.kept_per_row(model_dim)

    def without_weights(self):
        raise ValueError("experts with low-rank updates: merge them first (training.merge_lora)")

    def _apply(self, fn, recurse=True):
        scales = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, scale in scales.items():  # fp16 would lose the scales of small weights
            self._buffers[name] = scale.to(getattr(self, name).device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        held = dict(self._parameters)
        self._widen(torch.bfloat16)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(held)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        widened = self._widen(torch.float32)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in widened:
            held = Int8.of(getattr(self, name))
            self._parameters[name] = nn.Parameter(held.value, requires_grad=False)
            self._buffers[name + _SCALE] = held.scale
        self.mark()
        names = self.single_names()
        updates = {prefix + single for factor in self.updates for single in names[factor]}
        if updates.isdisjoint(state_dict):
            missing_keys[:] = [key for key in missing_keys if key not in updates]

    def _widen(self, dtype: torch.dtype) -> list[str]:
        """Hold int8 weights in ``dtype``, and return their names."""
        names = [name.removesuffix(_SCALE) for name in self._buffers]
        for name in names:
            held = Int8(getattr(self, name).detach(), getattr(self, name + _SCALE))
            self._parameters[name] = nn.Parameter(held.to(dtype), requires_grad=False)
        return names

    def extra_repr(self):
        how = f"rank={self.rank}, alpha={self.alpha:g}, storage={self.storage}"
        return f"{self.network.extra_repr()}, {how}"


@dataclass(frozen=True)
class LowRankNetwork:
    """A fused network whose weights are sums, which are computed again in the backward pass."""

    bank: LoRAExperts
    network: FusedNetwork
    is_operator = False

    def forward(self, rows, held, memory):
        """Compute :meth:`FusedNetwork.forward`; ``held`` are all tensors of the bank."""
        return self.network.forward(rows, self.bank.sums(held, rows.values.dtype), memory)

    def backward(self, d_out, rows, weight_R, saved, held, needs):
        """Compute :meth:`FusedNetwork.backward`."""
        params = self.bank.sums(held, rows.values.dtype)
        return self.network.backward(d_out, rows, weight_R, saved, params, needs)

    def backward_params(self, chunks, held) -> list[torch.Tensor | None]:
        """Return the gradients of A and B over all chunks; None for frozen tensors."""
        names = [*self.bank.layout, *(None for _ in held)]
        parts = [self.bank.factor_gradients(held, chunk) for chunk in chunks]
        return [
            torch.stack([part[name] for part in parts]).sum(0).to(tensor.dtype)
            if name in parts[0]
            else None
            for name, tensor in zip(names, held, strict=False)
        ]


def _frozen(base: ExpertBank, storage: str) -> tuple[StackedExperts, dict[str, Any]]:
    """Return the network without weights, and its weights by name: tensors, or Int8."""
    if isinstance(base, InferenceExperts):
        if storage not in ("same", base.storage):
            raise ValueError(f"storage={storage!r}: the experts are held in {base.storage} already")
        return base.network, base.stacks()
    if not isinstance(base, StackedExperts) or isinstance(base, LoRAExperts):
        raise ValueError(
            f"LoRA is for built-in or registered networks of experts that have none, not for "
            f"{type(base).__name__}; use the peft library for modules of your own"
        )
    frozen: dict[str, Any] = {}
    for name, stacked in base.layout.items():
        value = getattr(base, name).detach()
        if storage == "bf16":
            value = value.to(torch.bfloat16)
        is_weight = len(stacked.dims) == 2
        frozen[name] = Int8.of(value) if storage == "int8" and is_weight else value
    return base.without_weights(), frozen


def _joined(factor: torch.Tensor, parts: int, name: str) -> torch.Tensor:
    """Join factors of n neighbouring weights: A [e, n*r, A], or block-diagonal B [e, n*B, n*r]."""
    if parts == 1:
        return factor
    parted = factor.unflatten(0, (-1, parts))
    if name.endswith("lora_A"):
        return parted.flatten(1, 2)
    experts, _, outputs, rank = parted.shape
    whole = factor.new_zeros((experts, parts, outputs, parts, rank))
    for part in range(parts):
        whole[:, part, :, part] = parted[:, part]
    return whole.flatten(3, 4).flatten(1, 2)


def _parted(d_b: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the gradient of B [e*n, B, r] from that of :func:`_joined`'s."""
    split = d_b.unflatten(2, (parts, -1)).unflatten(1, (parts, -1))
    return torch.stack([split[:, part, :, part] for part in range(parts)], 1).flatten(0, 1)
