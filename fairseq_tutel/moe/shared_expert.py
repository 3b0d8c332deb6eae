"""An expert for every token, beside those that a token is routed to."""

from __future__ import annotations

import torch
from torch import nn

from .. import ops


class SharedExpert(nn.Module):
    """``fc2(dropout(activation(fc1(x))))`` with dropout after it, of all tokens.

    What every expert would otherwise learn for itself has a place here (DeepSeekMoE, arXiv
    2401.06066, section 3.2). Not routed and not exchanged: its parameters are dense ones, the same
    on all ranks, and a checkpoint keeps them in its shared file.

    Args:
        model_dim: M.
        hidden_dim: F of this expert.
        activation: a name that :func:`fairseq_tutel.ops.expert_ffn` takes.
        activation_dropout: probability after the activation.
        dropout: probability after fc2.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        if not isinstance(hidden_dim, int) or hidden_dim < 1:
            raise ValueError(f"shared_expert_dim={hidden_dim!r} must be a whole number, 0 for none")
        for p in (activation_dropout, dropout):
            ops.check_activation(activation, p)
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.fc1 = nn.Linear(model_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, model_dim)

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> [T, M], as an expert that gets all T rows."""
        params = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        dropouts = (self.activation_dropout, self.dropout) if self.training else (0.0, 0.0)
        return ops.expert_ffn(
            x_TM[None],
            *(param.to(x_TM.dtype)[None] for param in params),  # another dtype under autocast
            activation=self.activation,
            activation_dropout_p=dropouts[0],
            dropout_p=dropouts[1],
        )[0]

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
