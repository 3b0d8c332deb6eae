"""Check that the ranks' dense parameters do not drift apart.

A norm or an overflow check over one rank's own experts changes the gradients, or the number of
steps, on that rank alone. Then nothing fails, but the ranks train W different models.
"""

import json
import math
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed import gather_texts, is_expert, is_sharded, process_world

_PERIOD = 1024  # forward passes between two checks, after the first ones at powers of two
_TOLERANCE = 1e-6  # relative, of norms in fp64 of tensors that should be bit-equal


class ReplicaCheck:
    """Comparison of the ranks' dense gradients at an optimizer step, in the next forward pass.

    Ranks may skip steps, which is one of the errors to find, but they make forward passes together.
    So the check communicates in forward passes: after the 1st, 2nd, 4th, ... and every 1024th.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._passes = 0
        self._due = False
        self._steps = 0
        self._norm = 0.0

    @classmethod
    def watch(cls, model: nn.Module) -> None:
        """Watch a model, unless it is watched already."""
        hooks = model._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), cls) for hook in hooks):
            return
        check = cls(model)
        model.register_forward_pre_hook(check.before_forward)
        weakref.finalize(model, register_optimizer_step_pre_hook(check.before_step).remove)

    def __getstate__(self):
        """Return nothing: a copy of the model is not watched until it is prepared."""
        return {}

    def before_forward(self, module, args) -> None:
        """Compare the notes of the ranks since the last check, if there are any."""
        if torch.compiler.is_compiling() or not self.__dict__:
            return
        if not (module.training and torch.is_grad_enabled()) or process_world()[1] == 1:
            return
        if self._due:
            texts = gather_texts(json.dumps([self._steps, self._norm]))
            steps, norms = zip(*(json.loads(text or "") for text in texts), strict=True)
            if any(steps):
                self._due = False
                _refuse_drift(steps, norms)
        self._passes += 1
        if self._passes & (self._passes - 1) == 0 or self._passes % _PERIOD == 0:
            self._due, self._steps, self._norm = True, 0, 0.0

    def before_step(self, optimizer, args, kwargs):
        """Note the dense gradients that this rank's optimizer is about to use.

        If the step has a closure (Lightning), note the gradients after the closure.
        """
        model = self._model()
        if not self._due or model is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note(model, optimizer)
            return None

        def noted():
            result = closure()
            self._note(model, optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": noted}
        return (args[0], noted, *args[2:]), kwargs

    def _note(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        left_out = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        dense = {
            param
            for name, param in model.named_parameters()
            if not (is_expert(param) or is_sharded(param) or name in left_out)
        }
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in dense]
        self._steps += bool(mine)
        for param in mine:
            if param.grad is not None:
                norm = torch.linalg.vector_norm(param.grad.detach(), dtype=torch.float64)
                self._norm += norm.item()


def _refuse_drift(steps: tuple[int, ...], norms: tuple[float, ...]) -> None:
    if len(set(steps)) > 1:
        raise ValueError(
            f"the ranks made {list(steps)} optimizer steps since the last forward pass, as by "
            "GradScalers of their own: use fairseq_tutel.training.grad_scaler()"
        )
    finite = [norm for norm in norms if math.isfinite(norm)]
    spread = max(finite) - min(finite) if finite else 0.0
    alike = len(finite) in (0, len(norms)) and spread <= _TOLERANCE * max(finite, default=0.0)
    if not alike:
        raise ValueError(
            "the ranks' dense gradients differ at an optimizer step (norms "
            f"{', '.join(f'{norm:.6g}' for norm in norms)}), as after torch's clip_grad_norm_: use "
            "fairseq_tutel.training.clip_grad_norm_(model, max_norm), or allow it by "
            "prepare_data_parallel(model, check_replicas=False)"
        )
