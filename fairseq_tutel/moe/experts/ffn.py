"""Feed-forward experts of fairseq's ``moe`` branch, and the shared expert of all tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ... import ops
from ...config import EXPERTS
from ..torch_modes import call_in
from .base import PreparedExperts
from .int8 import INT8_MULTIPLE, Int8, expert_ffn_int8
from .stacked import StackedExperts, ffn_layout

# Names of activations -> the same in plain torch.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_accurate": partial(functional.gelu, approximate="tanh"),
    "gelu_fast": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda z: functional.relu(z).square(),
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "linear": lambda z: z,
}


@EXPERTS.register("ffn")
class Experts(StackedExperts):
    """fc2(dropout(activation(fc1(x)))), each with a bias, and dropout after it."""

    layout = ffn_layout("fc1")
    fp8 = False  # the forward pass multiplies in e4m3

    def compute_in(self, precision):
        units = self.hidden_dim // self.hidden_slice[1]
        if precision != "fp8" or self._is_replaced:
            super().compute_in(precision)
        elif self.model_dim % ops.FP8_MULTIPLE or units % ops.FP8_MULTIPLE:
            raise ValueError(
                f"expert_compute='fp8' needs multiples of {ops.FP8_MULTIPLE}, not "
                f"model_dim={self.model_dim} and {units} hidden units on a rank"
            )
        self.fp8 = precision == "fp8"
        self._refuse_gpu_without_fp8()

    def _refuse_gpu_without_fp8(self):
        if self.fp8 and self.fc1_weight.is_cuda:
            ops.check_fp8(self.fc1_weight.device)

    def _apply(self, *args, **options):  # torch's method behind cuda() and to()
        moved = super()._apply(*args, **options)
        self._refuse_gpu_without_fp8()
        return moved

    def keep(self, memory):
        if self._is_replaced:
            super().keep(memory)
        self.memory = memory

    def compute(self, prepared, rows, offsets):
        options = self._options(prepared)
        return ops.expert_ffn(
            rows,
            *self._tensors(prepared),
            activation=options.activation,
            offsets=offsets,
            activation_dropout_p=options.dropout_p[0],
            dropout_p=options.dropout_p[1],
            seed=options.draw_seed(rows.device),
            fp8=options.fp8,
        )

    def without_output_bias(self, prepared):
        *_, bias = self._tensors(prepared)
        if bias is None or prepared.dropout[1] > 0 or self._is_replaced:
            return prepared, None
        return prepared._replace(params=(*prepared.params[:-1], None)), bias

    @property
    def _is_replaced(self) -> bool:
        """Whether a subclass computes something else."""
        mine = type(self)
        return (mine.compute, mine.forward) != (Experts.compute, StackedExperts.forward)

    def gathers_tokens(self, prepared, x_TM):
        """Return whether :meth:`compute_tokens` is faster than to dispatch the tokens first."""
        return not (self._is_replaced or self.fp8) and ops.gathers_tokens(
            x_TM, self._tensors(prepared)[0]
        )

    def compute_tokens(self, prepared, x_TM, dest_row_TK, src_pair_R, offsets):
        """Compute the outputs [R, M] of the rows that ``ops.dispatch`` would write."""
        params, options = self._tensors(prepared), self._options(prepared)
        maps = dest_row_TK, src_pair_R
        return ops.token_ffn(x_TM, *maps, *params, offsets=offsets, options=options)

    def compute_lean(self, prepared, x_TM, *routing, offsets, late_bias):
        """Compute :func:`fairseq_tutel.ops.lean_ffn`, [T, M], on weights and maps of pairs."""
        given = {"options": self._options(prepared), "memory": self.memory}
        params = self._tensors(prepared)
        return ops.lean_ffn(x_TM, *routing, *params, offsets=offsets, late_bias=late_bias, **given)

    def lean_chunk(self, prepared, rows, offsets):
        """Compute one chunk without autograd; return the output and what :attr:`memory` keeps."""
        given = {"options": self._options(prepared), "memory": self.memory}
        return ops.lean_chunk(rows, *self._tensors(prepared), offsets=offsets, **given)

    def lean_chunk_bwd(self, prepared, rows, dy, weight_R, offsets, state, needs_rows):
        """Return :func:`fairseq_tutel.ops.lean_chunk_bwd` for what :meth:`lean_chunk` kept."""
        given = {"options": self._options(prepared), "needs_rows": needs_rows}
        tensors = ops.LeanChunk(*state), *self._tensors(prepared)
        return ops.lean_chunk_bwd(rows, dy, weight_R, *tensors, offsets=offsets, **given)

    @property
    def has_int8_product(self) -> bool:
        whole = all(dim % INT8_MULTIPLE == 0 for dim in (self.model_dim, self.hidden_dim))
        return whole and type(self).compute is Experts.compute

    def compute_int8(self, held, rows_NM):
        parts = dict(zip(self.layout, held, strict=True))
        w1, w2 = ((v.flatten(0, 1) for v in parts[f"fc{i}_weight"]) for i in (1, 2))
        b1, b2 = (parts.get(f"fc{i}_bias") for i in (1, 2))
        return expert_ffn_int8(
            rows_NM,
            Int8(*w1),
            None if b1 is None else b1.flatten(),
            Int8(*w2),
            None if b2 is None else b2.flatten(),
            activation=self._options(PreparedExperts(())).activation,
        )

    def chunk(self, prepared, rows, offsets, keep):
        options, tensors = self._options(prepared), self._tensors(prepared)
        return ops.ffn_chunk(rows, *tensors, offsets=offsets, options=options, keep_hidden=keep)

    def chunk_bwd(self, prepared, d_out, state, needs_rows):
        options, tensors = self._options(prepared), self._tensors(prepared)
        gradient = ops.ffn_chunk_bwd(
            d_out, ops.FFNChunk(*state), *tensors, options=options, needs_rows=needs_rows
        )
        return gradient.d_rows, gradient

    def chunks_bwd_params(self, prepared, states, gradients):
        chunks = [ops.FFNChunk(*state) for state in states]
        found = ops.ffn_chunks_bwd_params(chunks, gradients, *self._tensors(prepared))
        return self._gradients(prepared, found)

    def _options(self, prepared: PreparedExperts) -> ops.FFNOptions:
        return ops.FFNOptions(self.activation, prepared.dropout, prepared.part, self.fp8)

    def _tensors(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        """Return the weight and bias of fc1 and of fc2, as the operators take them."""
        return prepared.params

    def _gradients(self, prepared, found) -> tuple[torch.Tensor | None, ...]:
        """Return the operators' gradients in the shapes of ``prepared.params``."""
        return found

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class SharedExpert(nn.Module):
    """An expert for every token: ``fc2(dropout(activation(fc1(x))))`` with dropout after it.

    DeepSeekMoE, arXiv 2401.06066, section 3.2. The parameters are the same on all ranks. If it is
    gated, ``sigmoid(gate(x))``, a number per token, multiplies the output.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        activation: str,
        dropouts: tuple[float, float],
        gated: bool = False,
    ):
        super().__init__()
        if not isinstance(hidden_dim, int) or hidden_dim < 1:
            raise ValueError(f"shared_expert_dim={hidden_dim!r} must be a whole number, 0 for none")
        self.activation, self.dropouts = activation, dropouts
        for p in self.dropouts:
            ops.check_activation(activation, p)
        self.fc1 = nn.Linear(model_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, model_dim)
        self.gate = nn.Linear(model_dim, 1, bias=False) if gated else None

    @property
    def hidden_dim(self) -> int:
        return self.fc1.out_features

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        dtype, (after_activation, of_output) = x_TM.dtype, self.dropouts
        hidden_TF = ACTIVATIONS[self.activation](call_in(self.fc1, x_TM, dtype))
        hidden_TF = functional.dropout(hidden_TF, after_activation, self.training)
        y_TM = call_in(self.fc2, hidden_TF, dtype)
        y_TM = functional.dropout(y_TM, of_output, self.training)
        if self.gate is None:
            return y_TM
        return torch.sigmoid(call_in(self.gate, x_TM, dtype)) * y_TM

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
