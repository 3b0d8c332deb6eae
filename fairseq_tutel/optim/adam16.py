"""Adam whose moving averages are kept in fp16 with power-of-two scales.

State of a parameter (names and values of fairseq's ``FusedAdamV1`` with ``use_fp16_stats``)::

    step                int
    exp_avg             shape of the parameter, fp16
    exp_avg_sq          shape of the parameter, fp16
    exp_avg_scale       [] or [e], fp32: the first moment is exp_avg * exp_avg_scale
    exp_avg_sq_scale    [] or [e], fp32

The scale has shape [e] for stacked expert weights (attribute ``expert``, shape [e, ...]), one per
expert, so a checkpoint may cut the state of one expert out, or stack states, without rounding.
Where ranks hold parts of one parameter, :meth:`Adam16.share_scales` makes their scales one.
4 bytes per parameter instead of 8. Error bounds: ``backends/torch/adam.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import ops

STATISTICS = ("exp_avg", "exp_avg_sq")

# takes the elementwise maximum of a tensor over ranks, in place
ReduceMax = Callable[[Tensor], object]


def scale_shape(param: Tensor) -> torch.Size:
    """[e] for stacked expert weights [e, ...], [] for any other parameter."""
    return param.shape[:1] if getattr(param, "expert", False) else torch.Size()


def quantize_state(
    state: dict[str, Any], param: Tensor, reduce_max_: ReduceMax | None = None
) -> dict[str, Any]:
    """State of one parameter as ``Adam16`` keeps it.

    Takes a state of ``Adam16`` or ``FusedAdamV1``, whose fp16 values are kept bit for bit, or of
    fp32 Adam, without scales, which is rounded once; ``reduce_max_`` is then called for each
    statistic, see :meth:`Adam16.share_scales`.

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
            exact_SN = values.to(torch.float32, copy=True).reshape(rows)
            max_S = ops.finite_max(exact_SN)
            if reduce_max_ is not None:
                reduce_max_(max_S)
            restored[f"{name}_scale"] = ops.quantize_(
                restored[name].view(rows),
                exact_SN,
                round_up=name == "exp_avg_sq",
                max_S=max_S,
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
    # ids of the parameters that share_scales() was called with
    _parts: frozenset[int] = frozenset()
    _reduce_max_: ReduceMax | None = None

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

    def share_scales(self, params: Iterable[Tensor], reduce_max_: ReduceMax) -> None:
        """Take the scales of some parameters over ranks, each of which has a part of them.

        The parts' statistics, joined, are then bit for bit those of the whole parameter. Steps
        and the loading of fp32 statistics become collective.

        Args:
            params: of this optimizer.
            reduce_max_: maximum over the ranks with the other parts; called once per step, also
                where a parameter has no gradient.
        """
        self._parts = frozenset(id(param) for param in params)
        self._reduce_max_ = reduce_max_ if self._parts else None

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
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        devices = {param.device for param, _ in params if param.grad is not None}
        multipliers = {device: _reciprocal(scale, device) for device in devices}
        for param, _ in params:
            self._prepare(param)
        maxima = self._shared_maxima(params, multipliers)
        for param, group in params:
            if param.grad is not None:
                multiplier = multipliers[param.device]
                self._step_parameter(param, group, multiplier, maxima.get(id(param)))
        return loss

    def _prepare(self, param: Tensor) -> None:
        """Refuse what cannot be stepped, before anything is."""
        if param.grad is None:
            return
        if param.grad.is_sparse:
            raise ValueError(
                "Adam with fp16 statistics does not support sparse gradients "
                f"(parameter of shape {tuple(param.shape)})"
            )
        if not self.state[param]:
            self.state[param].update(_fresh_state(param))

    def _shared_maxima(self, params, multipliers) -> dict[int, Tensor]:
        """[2, S] by id of a parameter that is a part, over all ranks; one collective for all."""
        if self._reduce_max_ is None:
            return {}
        found = {}
        for param, group in params:
            if id(param) not in self._parts:
                continue
            if param.grad is None:  # the other ranks' parts may have one
                shape = (2, max(scale_shape(param).numel(), 1))
                found[id(param)] = torch.zeros(shape, device=param.device)
                continue
            state = self.state[param]
            found[id(param)] = ops.adam16_maxima(
                param,
                param.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["exp_avg_scale"],
                state["exp_avg_sq_scale"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                grad_multiplier=multipliers[param.device],
            )
        parts = list(found.values())
        flat = torch.cat([part.to(parts[0].device).flatten() for part in parts])
        self._reduce_max_(flat)
        sizes = [part.numel() for part in parts]
        return {
            key: maximum.view(part.shape).to(part.device)
            for (key, part), maximum in zip(found.items(), flat.split(sizes), strict=True)
        }

    def _step_parameter(
        self,
        param: Tensor,
        group: dict[str, Any],
        grad_multiplier: Tensor,
        maxima: Tensor | None,
    ) -> None:
        state = self.state[param]
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
            maxima=maxima,
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
                reduce_max_ = self._reduce_max_ if id(param) in self._parts else None
                self.state[param] = quantize_state(states[key], param, reduce_max_)


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
