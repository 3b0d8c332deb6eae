"""Adam whose moving averages are kept in fp16 with power-of-two scales.

State of a parameter (names and values of fairseq's ``FusedAdamV1`` with ``use_fp16_stats``)::

    step                int
    exp_avg             shape of the parameter, fp16
    exp_avg_sq          shape of the parameter, fp16
    exp_avg_scale       [] or [e], fp32: the first moment is exp_avg * exp_avg_scale
    exp_avg_sq_scale    [] or [e], fp32

The scale has shape [e] for stacked expert weights (attribute ``expert``, shape [e, ...]), one per
expert, so a checkpoint may cut the state of one expert out, or stack states, without rounding.
4 bytes per parameter instead of 8. Error bounds: ``backends/torch/adam.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import ops

STATISTICS = ("exp_avg", "exp_avg_sq")


def scale_shape(param: Tensor) -> torch.Size:
    """[e] for stacked expert weights [e, ...], [] for any other parameter."""
    return param.shape[:1] if getattr(param, "expert", False) else torch.Size()


def quantize_state(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """State of one parameter as ``Adam16`` keeps it.

    Takes a state of ``Adam16`` or ``FusedAdamV1``, whose fp16 values are kept bit for bit, or of
    fp32 Adam, without scales, which is rounded once.

    Raises:
        ValueError: a statistic has another shape than the parameter, or a scale is neither one
            number nor of the shape the parameter needs.
    """
    restored = {
        key: value
        for key, value in state.items()
        if not key.startswith(STATISTICS) and key != "max_exp_avg_sq"
    }
    restored["step"] = int(state.get("step", 0))
    for name in STATISTICS:
        values = state[name].to(param.device)
        if values.shape != param.shape:
            raise ValueError(
                f"optimizer state {name} has shape {tuple(values.shape)}, but its parameter "
                f"{tuple(param.shape)}"
            )
        scale = state.get(f"{name}_scale")
        target = scale_shape(param)
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=torch.float32, device=param.device)
            if scale.shape != target and scale.numel() != 1:
                raise ValueError(
                    f"optimizer state {name}_scale has shape {tuple(scale.shape)}; its parameter "
                    f"{tuple(param.shape)} needs {tuple(target)} or a scalar"
                )
            if scale.shape != target:
                scale = scale.reshape(()).expand(target)
            # Not necessarily fp16 tensors: fairseq's checkpoints hold every half tensor as fp32.
            restored[name] = values.to(torch.float16, copy=True).contiguous()
            restored[f"{name}_scale"] = scale.clone()
        else:
            restored[name] = torch.empty(param.shape, dtype=torch.float16, device=param.device)
            rows = (max(target.numel(), 1), -1)
            restored[f"{name}_scale"] = ops.quantize_(
                restored[name].view(rows),
                values.to(torch.float32, copy=True).reshape(rows),
                round_up=name == "exp_avg_sq",
            ).view(target)
    return restored


def dequantize_state(state: dict[str, Any]) -> dict[str, Any]:
    """State of one parameter with fp32 statistics and no scales, as fp32 Adam expects it.

    A state without scales is returned as it is.
    """
    if "exp_avg_scale" not in state:
        return state
    plain = {key: value for key, value in state.items() if not key.endswith("_scale")}
    for name in STATISTICS:
        values = state[name].float()
        scale = torch.as_tensor(state[f"{name}_scale"], dtype=torch.float32, device=values.device)
        plain[name] = values * scale.reshape(scale.shape + (1,) * (values.dim() - scale.dim()))
    return plain


class Adam16(torch.optim.Optimizer):
    """fairseq's Adam (AdamW) with fp16 statistics.

    Arithmetic is fp32 for fp32, fp16 and bf16 parameters alike, so it serves
    ``--memory-efficient-fp16``, ``--memory-efficient-bf16`` and, over fp32 copies, ``--fp16``.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr, betas, eps, weight_decay: as fairseq's Adam; eps is added to the root of the second
            moment before its bias correction, the decay is decoupled.

    Raises:
        ValueError: lr, eps or weight_decay below 0, or a beta outside [0, 1).
    """

    # fairseq's MemoryEfficientFP16Optimizer would overwrite the loaded state with the raw one.
    disable_mem_eff_fp16_loading_hack = True
    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    supports_step_with_scale = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"Adam: {name} must not be negative, not {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Adam: betas must be two numbers in [0, 1), not {betas}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float | Tensor = 1.0) -> Any:
        """One step on every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            scale: gradients are divided by it first (loss scale, clipping); a number or a tensor
                of one element.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        multipliers: dict[torch.device, Tensor] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.device not in multipliers:
                    multipliers[param.device] = _reciprocal(scale, param.device)
                self._step_parameter(param, group, multipliers[param.device])
        return loss

    def _step_parameter(
        self, param: Tensor, group: dict[str, Any], grad_multiplier: Tensor
    ) -> None:
        if param.grad.is_sparse:
            raise ValueError(
                "Adam with fp16 statistics does not support sparse gradients "
                f"(parameter of shape {tuple(param.shape)})"
            )
        state = self.state[param]
        if not state:
            state.update(_fresh_state(param))
        state["step"] += 1
        data = param.data.contiguous()
        state["exp_avg_scale"], state["exp_avg_sq_scale"] = ops.adam16_step_(
            data,
            param.grad.data,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["exp_avg_scale"],
            state["exp_avg_sq_scale"],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"],
            grad_multiplier=grad_multiplier,
        )
        if data.data_ptr() != param.data.data_ptr():
            param.data.copy_(data)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of ``FusedAdamV1`` or of Adam with fp32 statistics.

        torch's own loading would cast statistics and scales to the parameter's dtype; only the
        groups are left to it.

        Raises:
            ValueError: groups or shapes that do not fit this optimizer's parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        states = state_dict["state"]
        for key, param in zip(saved, own, strict=True):
            if states.get(key):
                self.state[param] = quantize_state(states[key], param)


def _reciprocal(scale: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.detach().to(device, torch.float32).reshape(()).reciprocal()
    # filled by a kernel: a copy from host memory would wait for all work of the GPU
    return torch.full((), scale, dtype=torch.float32, device=device).reciprocal()


def _fresh_state(param: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    for name in STATISTICS:
        state[name] = torch.zeros(param.shape, dtype=torch.float16, device=param.device)
        state[f"{name}_scale"] = torch.ones(
            scale_shape(param), dtype=torch.float32, device=param.device
        )
    return state
