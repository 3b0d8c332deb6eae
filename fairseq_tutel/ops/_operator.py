"""Registration of operators, and the checks and gradients that they share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from ..backends._torch_private import dispatch_questions
from ._flops import count_flops

HOW_TO_OFFLOAD = (
    "accelerate's offload needs preload_module_classes=['MoELayer'] and "
    "state_dict=dict(model.named_parameters())"
)


class Operator:
    """The ``torch.library`` operator ``fairseq_tutel::NAME``, which changes no argument.

    A call gives all arguments, also those with a default in the schema. In plain eager mode it
    runs the operator's functions directly, because torch's registered operators cost four times
    as much of the host's time. The results are the same bits.

    Raises:
        NotImplementedError: an argument carries a tangent. torch takes the tangents of such an
            operator to be zero, so ``torch.func.jvp`` and ``jacfwd`` would be wrong silently.
        ValueError: some arguments are on the meta device and others are not. torch would return
            uninitialised memory.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        fake: Callable,
        schema: str | None,
        flops: Callable | None,
    ):
        self._name = f"fairseq_tutel::{name}"
        self._function = function
        self._apply: Callable | None = None  # the function with its gradient
        self._definition = torch.library.custom_op(
            self._name, function, mutates_args=(), schema=schema
        )
        self._definition.register_fake(fake)
        if flops is not None:
            count_flops(name, flops)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradient, with the arguments of torch's operators."""
        self._definition.register_autograd(backward, setup_context=setup_context)

        # not torch's form with a setup_context of its own, which inspects signatures at each call
        def forward(ctx, *args):
            output = self._function(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        kind = type(self._name, (torch.autograd.Function,), members)
        # Function.apply also looks for transforms, which are excluded here
        parent: Any = super(torch.autograd.Function, kind)
        self._apply = parent.apply

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self._definition(*args)
        tensors = [value for value in args if isinstance(value, Tensor)]
        if is_plain_eager(args, tensors):
            # a list is faster than a generator
            if not (torch.is_grad_enabled() and any([x.requires_grad for x in tensors])):
                return self._function(*args)
            if self._apply is not None:
                return self._apply(*args)
        self._check(tensors)
        return self._definition(*args)

    def _check(self, tensors: list[Tensor]) -> None:
        if len({tensor.is_meta for tensor in tensors}) > 1:
            devices = ", ".join(str(tensor.device) for tensor in tensors)
            raise ValueError(
                f"{self._name} got tensors on {devices}: give the meta ones values, as by "
                f"load_state_dict(..., assign=True) or to_empty(); {HOW_TO_OFFLOAD}"
            )
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(
                f"{self._name} has no forward-mode derivative (torch.func.jvp and jacfwd): use "
                "torch.autograd.grad, or torch.autograd.functional.jacobian in reverse mode"
            )


_is_plain_thread, _keys_of, _PLAIN_KEYS = dispatch_questions()


def is_plain_eager(args: tuple, tensors: Sequence[Tensor]) -> bool:
    """Return whether nothing but a backend and autograd sees a call with these arguments."""
    if has_torch_function(args) or not _is_plain_thread():
        return False
    if not _PLAIN_KEYS.issuperset([_keys_of(tensor).raw_repr() for tensor in tensors]):
        return False
    # outside of forward mode, which has no dispatch key, it returns the tensor itself
    return not tensors or forward_ad.unpack_dual(tensors[0]).primal is tensors[0]


def operator(
    name: str, fake: Callable, schema: str | None = None, flops: Callable | None = None
) -> Callable[[Callable], Operator]:
    """Return a decorator that makes a function an :class:`Operator`.

    ``fake`` takes the same arguments and returns results without values. ``schema`` is torch's
    notation of the signature (default None: from the function's annotations). ``flops`` takes the
    output and the arguments, and returns the FLOPs of the products (default None: no products).
    """
    return lambda function: Operator(name, function, fake, schema, flops)


def save_inputs(ctx, inputs, output) -> None:
    """Save all inputs for an operator's backward pass."""
    ctx.save_for_backward(*inputs)


def empty_gradients(tensors: Iterable[Tensor], needs: Iterable[bool]) -> tuple[Tensor, ...]:
    """Return fake gradients; shape (0,) stands for one that is not needed."""
    pairs = zip(tensors, needs, strict=True)
    return tuple(x.new_empty(x.shape if needed else (0,)) for x, needed in pairs)


def check_indices(name: str, tensor: Tensor, *dims: str) -> None:
    """Raise ValueError unless the tensor is int32 with these dimensions."""
    if tensor.dim() != len(dims) or tensor.dtype != torch.int32:
        raise ValueError(
            f"{name} must be ({', '.join(dims)}) int32, got {tuple(tensor.shape)} {tensor.dtype}"
        )


def check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has the shape, or is None."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
