"""Matrices of stacked experts one by one, for optimizers that treat a matrix as a whole.

Muon makes each update orthogonal, matrix by matrix. A stacked weight [e, F, M] is e matrices, and a
stacked bias [e, F] has two dimensions and is none. Idea of the optimizer: Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import re

import torch
from torch import nn

from ..moe.experts import StackedExperts
from ..moe.model import unwrap


class ExpertMatrix(nn.Parameter):
    """One expert's matrix of a stacked parameter, as a parameter of an optimizer.

    The memory is the stack's, and so is the gradient: what reduces, clips or unscales gradients of
    the model's parameters does it to this one.

    Attributes:
        stack: the stacked parameter.
        index: of the matrix in it.
    """

    stack: nn.Parameter
    index: int

    @classmethod
    def of(cls, stack: nn.Parameter, index: int) -> ExpertMatrix:
        matrix = torch.Tensor._make_subclass(cls, stack.detach()[index], True)
        matrix.stack, matrix.index = stack, index
        return matrix

    @property
    def grad(self) -> torch.Tensor | None:
        """Of the stack; None there, set by whichever of its matrices, is None for all."""
        if self.data_ptr() != self.stack[self.index].data_ptr():
            raise ValueError(
                "the model's experts were moved or converted after matrix_parameters(model): call "
                "it afterwards, and make the optimizer of what it returns then"
            )
        return None if self.stack.grad is None else self.stack.grad[self.index]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.stack.grad = None
            return
        if self.stack.grad is None:
            self.stack.grad = torch.zeros_like(self.stack)
        self.stack.grad[self.index] = value


def matrix_parameters(
    model: nn.Module, leave_out: str | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """A model's trained parameters in two lists: matrices, each by itself, and all others.

    ::

        matrices, others = training.matrix_parameters(model, leave_out=r"embed|head|gate")
        muon, adam = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)
        training.save_checkpoint(path, model, [muon, adam])

    Args:
        model: on its device and in its dtype, wrapped or not.
        leave_out: a regular expression; a matrix in whose name it is found is among the others.

    Returns:
        [A, B] each: weights of linear layers, and of stacked experts one :class:`ExpertMatrix` per
        expert; then everything else, stacked biases of experts among it.

    Raises:
        ValueError: experts are in slices, of which a rank would see a part of each matrix.
    """
    model = unwrap(model)
    stacks: dict[int, bool] = {}  # of stacked parameters: whether a tensor in them is a matrix
    for path, bank in model.named_modules():
        if isinstance(bank, StackedExperts):
            if bank.hidden_slice[1] > 1:
                raise ValueError(
                    f"{path}: each rank holds a slice of its experts' matrices, which an optimizer "
                    "of whole matrices cannot step: use placement='replicated'"
                )
            for name, stacked in bank.layout.items():
                stacks[id(getattr(bank, name))] = len(stacked.dims) == 2
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        is_matrix = stacks.get(id(param), param.dim() == 2)
        if not is_matrix or (leave_out is not None and re.search(leave_out, name)):
            others.append(param)
        elif id(param) in stacks:
            matrices += [ExpertMatrix.of(param, index) for index in range(len(param))]
        else:
            matrices.append(param)
    return matrices, others
