"""The local experts: feed-forward networks whose weights are stacked, computed as one product each.

In memory the weights of all local experts are one tensor, so that e experts cost one batched (or
grouped) matrix product and not a loop. In state dicts they keep the names that fairseq's ``moe``
branch gives them, ``{j}.fc1.weight`` [F, M], ``{j}.fc1.bias`` [F], ``{j}.fc2.weight`` [M, F],
``{j}.fc2.bias`` [M] with j the local index, so that checkpoints do not depend on how they are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .. import ops
from ..distributed import (
    Flow,
    gather_weights,
    mark_expert,
    slice_dim,
    slice_size,
    take_slice,
    whole_shape,
)
from .chunks import ExpertRows

# A trace does not see collectives. Not said in the room below, which imports fast without a tracer.
_gather_weights = torch.compiler.disable(gather_weights)
_STACKED = {
    "fc1_weight": "fc1.weight",
    "fc1_bias": "fc1.bias",
    "fc2_weight": "fc2.weight",
    "fc2_bias": "fc2.bias",
}


class Network(NamedTuple):
    """A call of :class:`Experts` without its rows.

    Attributes:
        params: fc1's weight and bias, fc2's, in the dtype of the rows.
        options: activation and dropout.
        dropout_at_source: probability after fc2, where it is applied to what comes back.
    """

    params: tuple[torch.Tensor, ...]
    options: ops.FFNOptions
    dropout_at_source: float = 0.0


class Experts(nn.Module):
    """``fc2(dropout(activation(fc1(x))))`` with dropout after it, for every local expert.

    Args:
        expert_ids: global indices of the local experts; an expert's initial weights depend on its
            global index and ``seed`` only, so that they do not change with the number of ranks.
        model_dim: M.
        hidden_dim: F.
        activation: a name that :func:`fairseq_tutel.ops.expert_ffn` takes.
        activation_dropout: probability after the activation.
        dropout: probability after fc2 (inside the expert, as in fairseq's ``moe`` branch).
        seed: of the initial weights; drawn from torch's global generator if None.
        draw_on_cpu: whether every device starts from the same weights, drawn on the CPU; else each
            draws its own, which for billions of weights takes seconds instead of minutes.
        hidden_slice: (s, S): of the F hidden units of each expert, only the F/S of slice s live
            here (:mod:`fairseq_tutel.distributed.slices`), with the initial values that they have
            in the whole expert.
        num_holders: ranks that hold these experts, or slices of them.
    """

    def __init__(
        self,
        expert_ids: Sequence[int],
        model_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
        seed: int | None = None,
        draw_on_cpu: bool = True,
        hidden_slice: tuple[int, int] = (0, 1),
        num_holders: int = 1,
    ):
        super().__init__()
        for p in (activation_dropout, dropout):
            ops.check_activation(activation, p)
        self.expert_ids = tuple(expert_ids)
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.draw_on_cpu = draw_on_cpu
        self.hidden_dim = hidden_dim
        self.hidden_slice = hidden_slice
        self.num_holders = num_holders
        count, units = len(self.expert_ids), slice_size(hidden_dim, hidden_slice[1])
        shapes = {
            "fc1_weight": (count, units, model_dim),
            "fc1_bias": (count, units),
            "fc2_weight": (count, model_dim, units),
            "fc2_bias": (count, model_dim),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.mark()
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        self.reset_parameters(seed)

    def mark(self) -> None:
        """Mark the parameters as experts, with the number of copies that there are of each."""
        for name, single in _STACKED.items():
            cut = slice_dim(single) is not None
            copies = self.num_holders // (self.hidden_slice[1] if cut else 1)
            mark_expert(getattr(self, name), copies)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw weights and biases as nn.Linear does: uniform within 1/sqrt(fan in) of zero."""
        if self.fc1_weight.is_meta:
            return
        device = torch.device("cpu") if self.draw_on_cpu else self.fc1_weight.device
        for slot, expert in enumerate(self.expert_ids):
            generator = torch.Generator(device).manual_seed(seed + expert)
            model_dim = self.fc1_weight.shape[2]
            for layer, inputs, outputs in (
                ("fc1", model_dim, self.hidden_dim),
                ("fc2", self.hidden_dim, model_dim),
            ):
                bound = 1 / math.sqrt(inputs)
                for kind, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                    values = torch.empty(shape, device=device)
                    values.uniform_(-bound, bound, generator=generator)
                    mine = take_slice(values, f"{layer}.{kind}", *self.hidden_slice)
                    getattr(self, f"{layer}_{kind}")[slot].copy_(mine)

    def forward(self, batch: ExpertRows, network: Network | None = None) -> torch.Tensor:
        """[e, N, M] (padded) or [R, M] (ragged) -> the same shape.

        Args:
            batch: rows of the experts that the network has.
            network: what :meth:`network` returned; by default the experts as they are here.
        """
        network = self.network(batch.rows.dtype) if network is None else network
        return ops.expert_ffn(
            batch.rows,
            *network.params,
            activation=network.options.activation,
            offsets=batch.offsets,
            activation_dropout_p=network.options.dropout_p[0],
            dropout_p=network.options.dropout_p[1],
            seed=network.options.draw_seed(batch.rows.device),
        )

    def network(self, dtype: torch.dtype, flow: Flow | None = None) -> Network:
        """What is computed now, on rows of this dtype: another than the weights' under autocast.

        Args:
            flow: gathers what it says; collective then. Where experts can be in slices, dropout
                after fc2 is left to the rank of the tokens, so that it does not depend on r.
        """
        dropouts = (self.activation_dropout, self.dropout) if self.training else (0.0, 0.0)
        params = tuple(getattr(self, name).to(dtype) for name in _STACKED)
        at_source, part = 0.0, 0
        if flow is not None and not flow.is_plain:
            params, part = _gather_weights(params, flow), flow.part
            if flow.groups.placement == "sliced":
                dropouts, at_source = (dropouts[0], 0.0), dropouts[1]
        return Network(params, ops.FFNOptions(self.activation, dropouts, part), at_source)

    @property
    def has_hooks(self) -> bool:
        """Whether somebody wants to see calls of it: a profiler, fairseq's search for a NaN, or its
        checkpoint_wrapper, which replaces ``forward``.
        """
        kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        return "forward" in vars(self) or any(
            getattr(self, f"_{kind}") or getattr(torch.nn.modules.module, f"_global_{kind}")
            for kind in kinds
        )

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for stacked, single in _STACKED.items():
            param = getattr(self, stacked)
            param = param if keep_vars else param.detach()
            for slot in range(len(self.expert_ids)):
                destination[f"{prefix}{slot}.{single}"] = param[slot]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        wanted = set()
        for stacked, single in _STACKED.items():
            param = getattr(self, stacked)
            for slot in range(len(self.expert_ids)):
                key = f"{prefix}{slot}.{single}"
                wanted.add(key)
                value = state_dict.get(key)
                if value is None:
                    missing_keys.append(key)
                    continue
                # of an expert of which a slice lives here: that slice, or all of it
                if value.shape == whole_shape(param.shape[1:], single, self.hidden_slice[1]):
                    value = take_slice(value, single, *self.hidden_slice)
                if value.shape != param.shape[1:]:
                    error_msgs.append(
                        f"size mismatch for {key}: {tuple(value.shape)} in the checkpoint, "
                        f"{tuple(param.shape[1:])} in the model"
                    )
                    continue
                with torch.no_grad():
                    param[slot].copy_(value)
        if strict:
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in wanted
            )

    def single_names(self) -> dict[str, list[str]]:
        """Name of each stacked parameter -> its names in state dicts, one per local expert."""
        slots = range(len(self.expert_ids))
        return {
            stacked: [f"{slot}.{single}" for slot in slots] for stacked, single in _STACKED.items()
        }

    def extra_repr(self) -> str:
        count, hidden, model = self.fc1_weight.shape
        index, slices = self.hidden_slice
        part = "" if slices == 1 else f" (slice {index} of {slices}: {hidden})"
        return (
            f"local={count}, ids={self.expert_ids[0]}..{self.expert_ids[-1]}, model_dim={model}, "
            f"hidden_dim={self.hidden_dim}{part}, activation={self.activation}"
        )


class ExpertList(nn.ModuleList):
    """Custom expert modules, each mapping [n, M] to [n, M]; called one after the other."""

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__(experts)
        self.mark()

    def mark(self) -> None:
        """Mark the parameters as experts; all their holders have a copy."""
        for param in self.parameters():
            mark_expert(param)

    def forward(self, batch: ExpertRows) -> torch.Tensor:
        """As :meth:`Experts.forward`. NOTE: reads the row counts back to the host where ragged."""
        if batch.offsets is None:
            return torch.stack([f(x) for f, x in zip(self, batch.rows, strict=True)])
        ends = batch.offsets.tolist()
        sizes = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        tail = batch.rows.shape[0] - ends[-1]
        *parts, rest = batch.rows.split([*sizes, tail])
        return torch.cat([*(f(x) for f, x in zip(self, parts, strict=True)), rest])
