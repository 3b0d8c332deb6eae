"""Names of torch that are not public: each with its reason, and here alone.

Tests may fail with the next torch; a question that only makes something faster or clearer is
answered "no" by a torch without the name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def dispatch_questions() -> tuple[Callable[[], bool], Callable[[Tensor], Any], set[int]]:
    """Return how to tell whether torch runs nothing but a backend and autograd on tensors.

    A direct call then skips nothing. Return whether a thread has neither modes nor a profiler,
    which records registered operators; the dispatch keys of a tensor; and the keys of plain
    tensors. There is no public form: keys say whose code torch's dispatcher runs, also that of
    tracers, transforms and subclasses.
    """
    try:
        of_thread, of_tensor = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_keys
        thread_keys, tensor_keys = {_key_set("BackendSelect")}, set()  # in inference mode
        thread_keys.add(_key_set("BackendSelect", "ADInplaceOrView"))
        for kind in ("CPU", "CUDA"):
            tensor_keys.add(_key_set(kind, f"Autocast{kind}"))  # in inference mode
            usual = f"Autocast{kind}", f"Autograd{kind}", "ADInplaceOrView"
            tensor_keys.add(_key_set(kind, *usual))
        is_profiled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
    except AttributeError:
        return lambda: False, lambda tensor: None, set()
    return (
        lambda: not is_profiled() and of_thread().raw_repr() in thread_keys,
        of_tensor,
        tensor_keys,
    )


def _key_set(*names: str) -> int:
    keys = torch._C.DispatchKeySet.from_raw_repr(0)
    for name in names:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


def checkpoints() -> bool:
    """Return whether activation checkpointing will run this code again in the backward pass.

    False with ``use_reentrant=True``, which disables gradients instead, and if an old torch cannot
    tell.
    """
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def tracer_is_imported() -> bool:
    """Return whether torch's tracer is there; ``torch.compiler`` would import it, in a second."""
    return "torch._dynamo" in sys.modules


def hooks_of(module: nn.Module) -> list[dict]:
    """Return the module's hooks on calls, by kind: forward, forward pre, backward, backward pre.

    torch can add and remove hooks, but not list them.
    """
    return [getattr(module, f"_{kind}") for kind in _HOOKS]


def is_hooked(module: nn.Module) -> bool:
    """Return whether calls of the module, or of all modules, have hooks; asked in each pass."""
    every = nn.modules.module
    own = module._forward_hooks or module._forward_pre_hooks
    own = own or module._backward_hooks or module._backward_pre_hooks
    forward = every._global_forward_hooks or every._global_forward_pre_hooks
    return bool(own or forward or every._global_backward_hooks or every._global_backward_pre_hooks)


def first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first of ``module.parameters()``, which costs ten calls, or None."""
    for param in module._parameters.values():
        if param is not None:
            return param
    return next(module.parameters(), None)


def has_hooks(tensor: Tensor) -> bool:
    """Return whether the tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks)


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes, without which an unchanged tensor would be read."""
    return tensor._version


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped; None for any other module."""
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else None


def set_parameters(module: nn.Module, params: dict[str, Any]) -> None:
    """Replace all own parameters of a shallow copy, also by tensors that are no parameters.

    ``register_parameter`` would change the original, which shares the dictionary.
    """
    module._parameters = params


def int8_product(rows_NA: Tensor, weight_BA: Tensor, scale_B: Tensor) -> Tensor:
    """Return bf16 rows times a quantized weight, (N, B). No public product takes int8 weights."""
    product = torch._weight_int8pack_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(rows_NA, weight_BA, scale_B)


def active_ddp() -> Any:
    """Return the DistributedDataParallel whose forward pass runs this code, or None.

    Wrappers leave no public trace for the modules inside.
    """
    return getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)()


def fully_sharded() -> list[nn.Module]:
    """Return the modules that ``fully_shard`` has wrapped, which also leaves no other trace."""
    states = sys.modules.get("torch.distributed._composable_state")
    return list(getattr(states, "_module_state_mapping", None) or {})


class RefusesFiles(Tensor):
    """Tensor of one rank that refuses files in which it would stand for all ranks.

    torch.save stores it as a plain tensor, for files of one rank. Hosts write one file for all
    ranks with torch.distributed.checkpoint, which calls ``__create_write_items__``, or safetensors,
    which calls ``data_ptr``. Both raise ValueError. An extra state, the public form, would be in
    the state dict of one rank, too, where safetensors refuses it.
    """

    def refusal(self, name: str | None) -> str:
        """Return the text for torch.distributed.checkpoint, which gives a name, or safetensors."""
        raise NotImplementedError

    def data_ptr(self):
        raise ValueError(self.refusal(None))

    def __create_write_items__(self, name: str, value: Any):
        raise ValueError(self.refusal(name))

    def __deepcopy__(self, memo):
        return self.clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def scaler_of_parts(base: type[torch.amp.GradScaler], local: Callable[[Any], Any]) -> type:
    """Return a GradScaler of torch that unscales the gradients of ``local(parameter)``.

    ``base`` sums flags of overflow over the ranks. A fused optimizer reads the flag itself, so it
    keeps torch's shape and the values 0 and 1. torch has no method for either.
    """

    class Scaler(base):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.clamp_(max=1.0)  # a sum over ranks

        def step(self, optimizer, *args, **kwargs):
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if self.is_enabled() and stage is torch.amp.grad_scaler.OptState.READY:
                self.unscale_(optimizer)  # otherwise a fused optimizer reads this rank's flag only
            return super().step(optimizer, *args, **kwargs)

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, *rest):
            groups = [
                {"params": [local(param) for param in group["params"]]}
                for group in optimizer.param_groups
            ]
            given: Any = SimpleNamespace(param_groups=groups)
            return super()._unscale_grads_(given, inv_scale, found_inf.squeeze(), *rest)

    return Scaler
