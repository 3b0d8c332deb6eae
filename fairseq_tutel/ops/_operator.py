"""How an operator is registered, and the checks and gradients that operators share."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Operator:
    """The ``torch.library`` operator ``fairseq_tutel::NAME``, which changes no argument.

    torch takes the tangents of such an operator to be zero: ``torch.func.jvp`` and ``jacfwd`` would
    be wrong without a word. A call raises NotImplementedError if an argument carries a tangent.
    """

    def __init__(self, name: str, function: Callable, fake: Callable, schema: str | None):
        self._name = f"fairseq_tutel::{name}"
        self._definition = torch.library.custom_op(
            self._name, function, mutates_args=(), schema=schema
        )
        self._definition.register_fake(fake)
        self.register_autograd = self._definition.register_autograd

    def __call__(self, *args):
        if not torch.compiler.is_compiling():
            self._refuse_tangents(args)
        return self._definition(*args)

    def _refuse_tangents(self, args) -> None:
        for value in args:
            if torch.is_tensor(value) and forward_ad.unpack_dual(value).tangent is not None:
                raise NotImplementedError(
                    f"{self._name} has no forward-mode derivative (torch.func.jvp and jacfwd, "
                    "torch.autograd.forward_ad): use torch.autograd.grad, or "
                    "torch.autograd.functional.jacobian in reverse mode"
                )


def operator(
    name: str, fake: Callable, schema: str | None = None
) -> Callable[[Callable], Operator]:
    """Decorator: makes a function an :class:`Operator`. ``fake`` makes results without values;
    ``schema``: in torch's notation, that of the function's annotations if None.
    """
    return lambda function: Operator(name, function, fake, schema)


def save_inputs(ctx, inputs, output) -> None:
    """What an operator's backward pass needs where that is all that it was given."""
    ctx.save_for_backward(*inputs)


def empty_gradients(tensors: Iterable[Tensor], needs: Iterable[bool]) -> tuple[Tensor, ...]:
    """Fake gradients; shape (0,) stands for one that is not needed."""
    pairs = zip(tensors, needs, strict=True)
    return tuple(x.new_empty(x.shape if needed else (0,)) for x, needed in pairs)


def check_indices(name: str, tensor: Tensor, *dims: str) -> None:
    """Raise ValueError unless the tensor is int32 and has as many dimensions."""
    if tensor.dim() != len(dims) or tensor.dtype != torch.int32:
        raise ValueError(
            f"{name} must be ({', '.join(dims)}) int32, got {tuple(tensor.shape)} {tensor.dtype}"
        )


def check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has the shape, or is None."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
