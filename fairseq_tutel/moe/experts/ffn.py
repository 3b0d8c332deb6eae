"""Feed-forward experts of fairseq's ``moe`` branch, and the shared expert of all tokens."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ... import ops
from ...config import EXPERTS, ExpertConfig
from ..torch_modes import call_in
from .network import FusedNetwork
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
    """fc2(dropout(activation(fc1(x)))) with biases, then dropout."""

    layout = ffn_layout("fc1")
    fp8 = False  # the forward pass multiplies in e4m3

    def set_up(self, compute, memory):
        if self._is_replaced:
            super().set_up(compute, memory)
        units = self.hidden_dim // self.hidden_slice[1]
        if compute == "fp8" and (self.model_dim % ops.FP8_MULTIPLE or units % ops.FP8_MULTIPLE):
            raise ValueError(
                f"expert_compute='fp8' needs multiples of {ops.FP8_MULTIPLE}, not "
                f"model_dim={self.model_dim} and {units} hidden units on a rank"
            )
        self.fp8, self.memory = compute == "fp8", memory
        self._refuse_gpu_without_fp8()

    def _refuse_gpu_without_fp8(self):
        if self.fp8 and self.fc1_weight.is_cuda:
            ops.check_fp8(self.fc1_weight.device)

    def _apply(self, *args, **options):  # torch's method behind cuda() and to()
        moved = super()._apply(*args, **options)
        self._refuse_gpu_without_fp8()
        return moved

    def make_network(self, dropout, part):
        return None if self._is_replaced else self._fused(dropout, part)

    def _fused(self, dropout, part) -> FusedNetwork:
        return FusedNetwork(ops.FFNOptions(self.activation, dropout, part, self.fp8))

    def compute(self, prepared, rows, offsets):
        network = self._fused(prepared.dropout, prepared.part)
        options = network.options
        return ops.expert_ffn(
            rows,
            *network.operands(prepared.params),
            activation=options.activation,
            offsets=offsets,
            activation_dropout_p=options.dropout_p[0],
            dropout_p=options.dropout_p[1],
            seed=options.draw_seed(rows.device),
            fp8=options.fp8,
        )

    @property
    def _is_replaced(self) -> bool:
        """Whether a subclass computes something else."""
        mine = type(self)
        return (mine.compute, mine.forward) != (Experts.compute, StackedExperts.forward)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class SharedExpert(nn.Module):
    """An expert for every token: ``fc2(dropout(activation(fc1(x))))`` with dropout after it.

    DeepSeekMoE, arXiv 2401.06066, section 3.2. The parameters are the same on all ranks. If it is
    gated, ``sigmoid(gate(x))``, a number per token, multiplies the output.
    """

    def __init__(self, model_dim: int, config: ExpertConfig):
        super().__init__()
        self.activation = config.activation
        self.dropouts = config.activation_dropout, config.dropout
        for p in self.dropouts:
            ops.check_activation(self.activation, p)
        self.fc1 = nn.Linear(model_dim, config.shared_expert_dim)
        self.fc2 = nn.Linear(config.shared_expert_dim, model_dim)
        self.gate = nn.Linear(model_dim, 1, bias=False) if config.shared_expert_gate else None

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
