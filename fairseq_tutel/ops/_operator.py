"""How an operator is registered, and the checks and gradients that operators share."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Operator:
    """The ``torch.library`` operator ``fairseq_tutel::NAME``, which changes no argument.

    torch takes the tangents of such an operator to be zero: ``torch.func.jvp`` and ``jacfwd`` would
    be wrong without a word. A call raises NotImplementedError if an argument carries a tangent.

    Where nobody could see the operator its functions are called directly: a layer's forward and
    backward pass have 12 operators, and torch spends 0.05 ms on each in its dispatcher's Python
    code. (An ExecutionTraceObserver without a profiler is not asked: torch has no way to.) A call
    gives all arguments, also those with a default in the schema.
    """

    def __init__(self, name: str, function: Callable, fake: Callable, schema: str | None):
        self._name = f"fairseq_tutel::{name}"
        self._function = function
        self._apply: Callable | None = None  # with gradients
        self._definition = torch.library.custom_op(
            self._name, function, mutates_args=(), schema=schema
        )
        self._definition.register_fake(fake)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As of torch's operators; ``setup_context(ctx, inputs, output)``."""
        self._definition.register_autograd(backward, setup_context=setup_context)
        function = self._function

        # in one, since torch looks up the signature in every call of a forward without a context
        def forward(ctx, *args):
            output = function(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        kind = type(self._name, (torch.autograd.Function,), members)
        # torch.autograd.Function.apply looks for what transforms left behind; __call__ has looked
        self._apply = super(torch.autograd.Function, kind).apply

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self._definition(*args)
        if not _somebody_observes():
            differentiable = False
            for value in args:
                if type(value) in _PLAIN:
                    if value.is_meta or _is_wrapped(value):
                        break
                    differentiable = differentiable or value.requires_grad
                elif isinstance(value, Tensor):
                    break
            else:
                if not (differentiable and torch.is_grad_enabled()):
                    return self._function(*args)
                if self._apply is not None:
                    return self._apply(*args)
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


def _make_observer() -> Callable[[], bool]:
    """Whether somebody traces, transforms or profiles operators; torch tells in these functions of
    its own. Where this torch lacks one of them, everything counts as observed."""
    try:
        modes, functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
        included = torch._C._dispatch_tls_is_dispatch_key_included
        # of is_grads_batched and functional.jacobian(vectorize=True), and of make_fx
        batched, traced = map(torch._C._dispatch_key_parse, ("VmapMode", "PreDispatch"))
        is_tracing, transforms = torch._C._is_tracing, torch._C._are_functorch_transforms_active
        profiles = torch.autograd._profiler_enabled
        # what a call may not reach fails here, not in the first one that does
        included(batched), forward_ad._current_level  # noqa: B018

        # one function without a loop: it is called for every operator
        def observes() -> bool:
            return (
                is_tracing()
                or transforms()
                or profiles()
                or modes() > 0
                or functions() > 0
                or forward_ad._current_level >= 0
                or included(batched)
                or included(traced)
            )

    except (AttributeError, RuntimeError):
        return lambda: True
    return observes


_somebody_observes = _make_observer()
# Whether a tensor is one that a function under torch.func saw, kept after the transform was over
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda value: True)
_PLAIN = (Tensor, torch.nn.Parameter)


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
