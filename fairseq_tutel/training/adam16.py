"""Adam with moving averages in fp16 and power-of-two scales.

State of a parameter (names and values of fairseq's ``FusedAdamV1`` with ``use_fp16_stats``)::

    step                               int
    exp_avg, exp_avg_sq                shape of the parameter, fp16
    exp_avg_scale, exp_avg_sq_scale    [] or [e], fp32: the moment is exp_avg * exp_avg_scale

The state takes 4 bytes per parameter instead of 8. Stacked expert weights (attribute ``expert``,
shape [e, ...]) have one scale per expert, so a checkpoint can cut out or stack the states of single
experts without rounding. If ranks hold parts of one parameter, :meth:`Adam16.share_scales` makes
their scales equal. Error bounds: ``backends/torch/adam.py``.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import ops

STATISTICS = ("exp_avg", "exp_avg_sq")

# Small parameters share a launch on a GPU: those with at most so many elements per scale.
_SMALL = 1 << 14

# takes the elementwise maximum of a tensor over ranks, in place
ReduceMax = Callable[[Tensor], object]


def scale_shape(param: Tensor) -> torch.Size:
    """Return [e] for stacked expert weights [e, ...], [] for any other parameter."""
    return param.shape[:1] if getattr(param, "expert", False) else torch.Size()


def quantize_state(
    state: dict[str, Any], param: Tensor, reduce_max_: ReduceMax | None = None
) -> dict[str, Any]:
    """Return the state of one parameter in the form of ``Adam16``.

    fp16 values of ``Adam16`` and ``FusedAdamV1`` keep their bits. The state of fp32 Adam, which has
    no scales, is rounded once; ``reduce_max_`` is then called for each statistic, see
    :meth:`Adam16.share_scales`.
    """
    dropped = (*STATISTICS, "max_exp_avg_sq")
    restored = {key: value for key, value in state.items() if not key.startswith(dropped)}
    restored["step"] = int(state.get("step", 0))
    for name in STATISTICS:
        values, scale = state[name].to(param.device), state.get(f"{name}_scale")
        if values.shape != param.shape:
            shapes = f"{tuple(values.shape)}, but its parameter {tuple(param.shape)}"
            raise ValueError(f"optimizer state {name} has shape {shapes}")
        if scale is not None:
            # Not necessarily fp16 tensors: fairseq's checkpoints hold every half tensor as fp32.
            restored[name] = values.to(torch.float16, copy=True).contiguous()
            restored[f"{name}_scale"] = _fitting_scale(scale, param, name)
            continue
        restored[name] = torch.empty(param.shape, dtype=torch.float16, device=param.device)
        rows = (max(scale_shape(param).numel(), 1), -1)
        exact_QN = values.to(torch.float32, copy=True).reshape(rows)
        max_Q = ops.finite_max(exact_QN)
        if reduce_max_ is not None:
            reduce_max_(max_Q)
        scale_Q = ops.quantize_(
            restored[name].view(rows), exact_QN, round_up=name == "exp_avg_sq", max_Q=max_Q
        )
        restored[f"{name}_scale"] = scale_Q.view(scale_shape(param))
    return restored


def _fitting_scale(scale: float | Tensor, param: Tensor, name: str) -> Tensor:
    scale = torch.as_tensor(scale, dtype=torch.float32, device=param.device)
    wanted = scale_shape(param)
    if scale.numel() == 1:
        scale = scale.reshape(()).expand(wanted)
    if scale.shape != wanted:
        raise ValueError(
            f"optimizer state {name}_scale has shape {tuple(scale.shape)}; its parameter "
            f"{tuple(param.shape)} needs {tuple(wanted)} or a scalar"
        )
    return scale.clone()


def dequantize_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter for fp32 Adam: fp32 statistics, no scales.

    A state without scales is returned as it is.
    """
    plain = {key: value for key, value in state.items() if not key.endswith("_scale")}
    for name in STATISTICS if "exp_avg_scale" in state else ():
        values = state[name].float()
        scale = torch.as_tensor(state[f"{name}_scale"], dtype=torch.float32, device=values.device)
        plain[name] = values * scale.reshape(scale.shape + (1,) * (values.dim() - scale.dim()))
    return plain


class Adam16(torch.optim.Optimizer):
    """fairseq's Adam (AdamW) with fp16 statistics and the same arguments.

    Arithmetic is fp32 for fp32, fp16 and bf16 parameters alike. So it serves
    ``--memory-efficient-fp16``, ``--memory-efficient-bf16`` and, over fp32 copies, ``--fp16``. eps
    is added to the root of the second moment before its bias correction. Weight decay is decoupled.
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
        """Use one scale for all parts of a parameter that is spread over ranks.

        The joined statistics are then bit-identical to those of the whole parameter. Steps and the
        loading of fp32 statistics become collective: ``reduce_max_`` takes the maximum over the
        ranks with parts of ``params``, once per step, also if a parameter has no gradient.
        """
        self._parts = frozenset(id(param) for param in params)
        self._reduce_max_ = reduce_max_ if self._parts else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float | Tensor = 1.0) -> Any:
        """Step every parameter that has a gradient; ValueError if one is sparse.

        Args:
            closure: evaluates the model again and returns the loss (default None).
            scale: divisor of the gradients (loss scale, clipping), a number or a tensor with one
                element (default 1).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        stepped = [(param, group) for param, group in params if param.grad is not None]
        for param, _ in stepped:  # refuse before any step
            if param.grad.is_sparse:
                raise ValueError(f"Adam16 takes no sparse gradient, as of {tuple(param.shape)}")
            if not self.state[param]:
                self.state[param].update(_fresh_state(param))
        devices = {param.device for param, _ in stepped}
        multipliers = {device: _reciprocal(scale, device) for device in devices}
        maxima = self._shared_maxima(params, multipliers)
        together: dict[tuple, tuple[dict, list]] = {}  # small parameters by what they share
        for param, group in stepped:
            state, data = self.state[param], param.data.contiguous()
            is_copy = data.data_ptr() != param.data.data_ptr()
            state["step"] += 1
            tensors = [data, param.grad.data, *self._statistics(param)]
            beta1, beta2 = group["betas"]
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= {"beta1": beta1, "beta2": beta2, "step": state["step"]}
            options["grad_multiplier"] = multipliers[param.device]
            small = 0 < param.numel() <= _SMALL * max(state["exp_avg_scale"].numel(), 1)
            if small and id(param) not in maxima and not is_copy:
                *numbers, _ = options.values()
                key = (param.device, param.dtype, param.grad.dtype, *numbers)
                together.setdefault(key, (options, []))[1].append(tensors)
                continue
            state["exp_avg_scale"], state["exp_avg_sq_scale"] = ops.adam16_step_(
                *tensors, **options, maxima=maxima.get(id(param))
            )
            if is_copy:
                param.data.copy_(data)
        for options, states in together.values():
            ops.adam16_steps_(states, **options)
        return loss

    def _shared_maxima(self, params, multipliers) -> dict[int, Tensor]:
        """Return each part's :func:`adam16_maxima` over all ranks, by id; one collective."""
        if self._reduce_max_ is None:
            return {}
        found = {}
        for param, group in params:
            if id(param) not in self._parts:
                continue
            if param.grad is None:  # other ranks' parts may have a gradient
                shape = (2, max(scale_shape(param).numel(), 1))
                found[id(param)] = param.new_zeros(shape, dtype=torch.float32)
                continue
            found[id(param)] = ops.adam16_maxima(
                param,
                param.grad,
                *self._statistics(param),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                grad_multiplier=multipliers[param.device],
            )
        if not found:
            return {}
        parts = list(found.values())
        flat = torch.cat([part.to(parts[0].device).flatten() for part in parts])
        self._reduce_max_(flat)
        for part, maximum in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(maximum.view(part.shape))
        return found

    def _statistics(self, param: Tensor) -> list[Tensor]:
        """Return the two statistics, then their scales."""
        names = (*STATISTICS, *(f"{name}_scale" for name in STATISTICS))
        return [self.state[param][name] for name in names]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of ``FusedAdamV1`` or of Adam with fp32 statistics.

        torch loads the groups only, because it would cast statistics and scales to the parameter's
        dtype.
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
        state[f"{name}_scale"] = param.new_ones(scale_shape(param), dtype=torch.float32)
    return state
