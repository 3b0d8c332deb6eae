"""Single matrices of stacked experts, for optimizers that step a matrix as a whole.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") makes each
update of a matrix orthogonal. A stacked weight [e, F, M] is e matrices, a stacked bias is none.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from ..moe.experts import StackedExperts
from ..moe.model import unwrap


class ExpertMatrix(nn.Parameter):
    """One expert's matrix of a stacked parameter, as a parameter of an optimizer.

    Values and gradient are views of the stack's. Reducing, clipping or unscaling the gradients of
    the model's parameters changes them here, too.
    """

    stack: nn.Parameter  # [e, A, B]
    index: int  # number of the matrix in the stack

    @classmethod
    def of(cls, stack: nn.Parameter, index: int) -> ExpertMatrix:
        """Return matrix ``index`` of a stacked parameter; a view."""
        matrix = torch.Tensor._make_subclass(cls, stack.detach()[index], True)
        matrix.stack, matrix.index = stack, index
        return matrix

    @property
    def grad(self) -> torch.Tensor | None:
        """View of the stack's gradient. Setting None on one matrix clears all of them."""
        if self.data_ptr() != self.stack[self.index].data_ptr():
            raise ValueError(
                "experts were moved or converted after matrix_parameters(model): call it again and "
                "make the optimizer from its result"
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
    """Split a model's trained parameters into single matrices and all others; not collective.

    The matrices are for ``torch.optim.Muon`` (torch 2.9), the others for AdamW; README.md in this
    folder has an example. ``save_checkpoint(path, model, optimizers)`` takes both optimizers.

    Args:
        model (nn.Module): the model on its device and in its dtype, wrapped or not. Its experts, if
            it has any, are not in slices.
        leave_out (str): regular expression; a matrix is among the others if the expression is found
            in its name (default None: all matrices are among the matrices).

    Returns:
        tuple of two lists: parameters [A, B], with one :class:`ExpertMatrix` per expert of a
        stacked weight; and the others, including the experts' stacked biases.
    """
    model = unwrap(model)
    stacks: dict[int, bool] = {}  # id of a stacked parameter -> whether one expert's is a matrix
    for path, bank in model.named_modules():
        if isinstance(bank, StackedExperts):
            if bank.hidden_slice[1] > 1:
                raise ValueError(
                    f"{path}: each rank holds a slice of its matrices: use placement='replicated'"
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
