"""The optimizer state of a stock fairseq checkpoint, by parameter name, and that of its experts.

Stock fairseq numbers parameters in the order of the model; ``--fp16`` (without
``--fp16-no-flatten-grads``) keeps the statistics of all of them in one vector. Both are read here,
of Adam alone, whose two statistics have a meaning.

An expert sees K*T/E of T tokens, each with a weight of about 1/K: its gradient is 1/E of what the
dense network's was, and the second moment, which noise dominates, 1/(E*K) of it. So ``m/E`` and
``v/(E*K)``, a heuristic that makes the first steps about as large as the dense model's were
times sqrt(K/E). ``--moe-normalize-expert-grad sqrt_world_size`` makes gradients sqrt(W) larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import CheckpointError
from ..state import NAMED_STATE, parameters

_MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}  # powers of the gradient
_SCALES = {f"{name}_scale": name for name in _MOMENTS}
# weights that fairseq ties: a checkpoint of half weights has each of them by itself
_TIED = ("embed_tokens.weight", "output_projection.weight")
_DROP = "; --optimizer drop leaves it out"

Named = dict[str, dict[str, Any]]


def named_optimizer(stored: Mapping[str, Any], model: Mapping[str, Any], where: str) -> dict:
    """A stock optimizer state in the form of :mod:`..state`; ``model``: the checkpoint's tensors.

    Raises:
        CheckpointError: it is not Adam's, is in several groups, or does not fit the model.
    """
    groups, states = stored.get("param_groups"), stored.get("state")
    if not isinstance(states, Mapping) or not isinstance(groups, list) or len(groups) != 1:
        raise CheckpointError(
            f"{where}: its optimizer state is not of one group of parameters" + _DROP
        )
    params = _params_of(model)
    order = list(groups[0].get("params", ()))
    if len(order) == 1 and len(params) > 1:
        by_name = _cut(states.get(order[0], {}), params, where)
    elif len(order) == len(params):
        by_name = {name: dict(states.get(i, {})) for name, i in zip(params, order, strict=True)}
    else:
        raise CheckpointError(
            f"{where}: its optimizer has {len(order)} parameters, the model {len(params)}" + _DROP
        )
    for name, state in by_name.items():
        _check(name, state, params[name], where)
    kept = [{key: value for key, value in groups[0].items() if key != "params"}]
    return {
        NAMED_STATE: by_name,
        "param_groups": kept,
        "loss_scale": stored.get("loss_scale"),
    }


def expert_state(
    state: Mapping[str, Any], num_experts: int, top_k: int, gradient: float
) -> dict[str, Any]:
    """The state of one of E copies, see the module docstring; ``gradient``: what its gradient is
    multiplied by beside.
    """
    factors = {1: gradient / num_experts, 2: gradient**2 / (num_experts * top_k)}
    scaled = {}
    for key, value in state.items():
        power = _MOMENTS.get(_SCALES.get(key, key))
        has_scale = f"{key}_scale" in state  # which then takes the factor, without rounding
        if power is None or has_scale:
            scaled[key] = value.clone() if isinstance(value, Tensor) else value
        else:
            scaled[key] = value * factors[power]
    return scaled


def fresh_state(like: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Zero statistics and no steps, in the form of another parameter's state: with statistics of
    zero, old steps would make the first moves as small as they make those of a trained one.
    """
    fresh: dict[str, Any] = {}
    for key, value in like.items():
        if key in _MOMENTS:
            fresh[key] = torch.zeros_like(param, dtype=value.dtype)
        elif key in _SCALES:
            fresh[key] = torch.ones_like(value) if isinstance(value, Tensor) else 1.0
        else:
            fresh[key] = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)
    return fresh


def _params_of(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that an optimizer has, in its order: each tied one once."""
    params = parameters(model)
    tied: list[Tensor] = []
    for name in [name for name in params if name.endswith(_TIED)]:
        if any(
            each.shape == params[name].shape and torch.equal(each, params[name]) for each in tied
        ):
            del params[name]
        else:
            tied.append(params[name])
    return params


def _cut(flat: Mapping[str, Any], params: Mapping[str, Tensor], where: str) -> Named:
    """Of the state of one vector of all parameters the parts of each."""
    sizes = [param.numel() for param in params.values()]
    by_name: Named = {name: {} for name in params}
    for key, value in flat.items():
        if not isinstance(value, Tensor) or value.numel() <= 1:
            for state in by_name.values():
                state[key] = value
            continue
        if value.numel() != sum(sizes):
            raise CheckpointError(
                f"{where}: the optimizer's {key} has {value.numel()} numbers, the model "
                f"{sum(sizes)}" + _DROP
            )
        for (name, param), part in zip(params.items(), value.flatten().split(sizes), strict=True):
            by_name[name][key] = part.view(param.shape)
    return by_name


def _check(name: str, state: Mapping[str, Any], param: Tensor, where: str) -> None:
    known = {"step", *_MOMENTS, *_SCALES}
    if strange := sorted(set(state) - known):
        raise CheckpointError(f"{where}: {strange[0]!r} of {name} is no state of Adam" + _DROP)
    for key in _MOMENTS:
        if key in state and state[key].shape != param.shape:
            raise CheckpointError(
                f"{where}: the optimizer's {key} of {name} is {list(state[key].shape)}, the "
                f"parameter {list(param.shape)}" + _DROP
            )


def gradient_factor(normalization: str, world_size: int) -> float:
    """What expert gradients are multiplied by, against the true ones."""
    return math.sqrt(world_size) if normalization == "sqrt_world_size" else 1.0
