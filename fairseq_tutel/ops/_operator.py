"""Registration of operators, and the checks and gradients that they share."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Operator:
    """The ``torch.library`` operator ``fairseq_tutel::NAME``, which changes no argument.

    A call gives all arguments, also those with a default in the schema.

    Raises:
        NotImplementedError: an argument carries a tangent. torch takes the tangents of such an
            operator to be zero, so ``torch.func.jvp`` and ``jacfwd`` would be wrong silently.
        ValueError: some arguments are on the meta device and others are not. torch would return
            uninitialised memory.
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
            self._check([value for value in args if isinstance(value, Tensor)])
        return self._definition(*args)

    def _check(self, tensors: list[Tensor]) -> None:
        if len({tensor.is_meta for tensor in tensors}) > 1:
            devices = ", ".join(str(tensor.device) for tensor in tensors)
            raise ValueError(
                f"{self._name} got tensors on {devices}: give the meta ones values, as by "
                "load_state_dict(..., assign=True) or to_empty(); accelerate's offload needs "
                "preload_module_classes=['MoELayer'] and state_dict=dict(model.named_parameters())"
            )
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(
                f"{self._name} has no forward-mode derivative (torch.func.jvp and jacfwd, "
                "torch.autograd.forward_ad): use torch.autograd.grad, or "
                "torch.autograd.functional.jacobian in reverse mode"
            )


def operator(
    name: str, fake: Callable, schema: str | None = None
) -> Callable[[Callable], Operator]:
    """Return a decorator that makes a function an :class:`Operator`.

    Args:
        name: of the operator.
        fake: returns results without values, from the same arguments.
        schema: in torch's notation; that of the function's annotations if None (default).
    """
    return lambda function: Operator(name, function, fake, schema)


def save_inputs(ctx, inputs, output) -> None:
    """Save all inputs for an operator's backward pass."""
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
