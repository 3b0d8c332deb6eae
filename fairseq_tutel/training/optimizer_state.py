"""Optimizer state by parameter name, one entry per expert, and back.

torch numbers parameters; numbers change with the number of ranks. Here the state of a stacked
expert parameter is taken apart into one state per expert under the name that its weight has in a
checkpoint, so that each expert's moments follow it to any rank.

With ``--fp16`` or ``--bf16`` the optimizer steps fp32 copies of the weights. They are part of its
state here; stock fairseq makes new ones from the half weights and loses what was rounded off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..moe import Experts

# entry of a parameter's state: the fp32 copy that a mixed-precision optimizer steps
_MASTER = "fp32_weight"


class StateNames:
    """Names of the parameters of a fairseq optimizer in the optimizer's own order.

    Args:
        optimizer: a fairseq optimizer over parameters of the modules.
        modules: prefix -> module; the model has the prefix "".

    Raises:
        ValueError: the optimizer holds a parameter that is in none of the modules.
    """

    def __init__(self, optimizer, modules: dict[str, nn.Module]):
        names: dict[int, str] = {}
        self._single: dict[str, list[str]] = {}
        self._shapes: dict[str, torch.Size] = {}
        for prefix, module in modules.items():
            for name, param in module.named_parameters():
                names[id(param)] = prefix + name
            for path, child in module.named_modules():
                if isinstance(child, Experts):
                    for stacked, single in child.single_names().items():
                        self._single[f"{prefix}{path}.{stacked}"] = [
                            f"{prefix}{path}.{name}" for name in single
                        ]
        # a mixed-precision optimizer steps fp32 copies, listed in the order of their originals
        copies = getattr(optimizer, "fp32_params", ())
        self._masters: dict[str, torch.Tensor] = {}
        for original, copy in zip(getattr(optimizer, "fp16_params", ()), copies, strict=True):
            names[id(copy)] = names[id(original)]
            self._masters[names[id(original)]] = copy.detach()
        self._order: list[str] = []
        for param in optimizer.params:
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is in "
                    "neither model nor criterion, so its state has no name in a checkpoint"
                )
            name = names[id(param)]
            self._order.append(name)
            self._shapes[name] = param.shape

    def to_named(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """torch's form -> ``named_state``, ``param_groups`` and ``loss_scale``."""
        states = {self._order[index]: state for index, state in state_dict["state"].items()}
        for name, master in self._masters.items():
            states[name] = {**states.get(name, {}), _MASTER: master}
        named: dict[str, dict[str, Any]] = {}
        for name, state in states.items():
            single = self._single.get(name)
            if single is None:
                named[name] = dict(state)
            else:
                for slot, expert_name in enumerate(single):
                    named[expert_name] = {
                        key: _take(value, slot, len(single), self._shapes[name])
                        for key, value in state.items()
                    }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in state_dict["param_groups"]
        ]
        return {
            "named_state": named,
            "param_groups": groups,
            "loss_scale": state_dict.get("loss_scale"),
        }

    def from_named(self, stored: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        """Back to torch's form, for ``optimizer.load_state_dict``.

        Args:
            stored: result of :meth:`to_named`, possibly with other experts.
            current: the optimizer's own ``state_dict()``, for the numbering of its groups.

        Raises:
            ValueError: state is missing for some parameter, or the number of groups differs.
        """
        groups = stored["param_groups"]
        if len(groups) != len(current["param_groups"]):
            raise ValueError(
                f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has "
                f"{len(current['param_groups'])}; use --reset-optimizer"
            )
        named = stored["named_state"]
        state = {}
        if named:
            for index, name in enumerate(self._order):
                parts = [named.get(key) for key in self._single.get(name, [name])]
                if any(part is None for part in parts):
                    raise ValueError(
                        f"the checkpoint has no optimizer state for {name}; use --reset-optimizer"
                    )
                keys = [key for key in parts[0] if key != _MASTER]
                if name in self._single:
                    state[index] = {
                        key: _join([part[key] for part in parts], self._shapes[name], name)
                        for key in keys
                    }
                else:
                    state[index] = {key: parts[0][key] for key in keys}
        result = {
            "state": state,
            "param_groups": [
                {**theirs, "params": mine["params"]}
                for theirs, mine in zip(groups, current["param_groups"], strict=True)
            ],
        }
        if stored.get("loss_scale") is not None:
            result["loss_scale"] = stored["loss_scale"]
        return result

    @torch.no_grad()
    def restore_masters(self, stored: dict[str, Any]) -> None:
        """Set the fp32 copies to what :meth:`to_named` stored, where there are and were any."""
        named = stored["named_state"]
        for name, master in self._masters.items():
            parts = [named.get(key, {}).get(_MASTER) for key in self._single.get(name, [name])]
            if all(part is not None for part in parts):
                value = torch.stack(parts) if name in self._single else parts[0]
                master.copy_(value)


# a state entry that one number describes for all experts of a rank, with how many those are
_MIXED = "over_experts"


def _take(value, slot: int, count: int, shape: torch.Size):
    """One expert's share of an entry in the state of a stacked parameter.

    A slice of a moment or of its means over some dimensions (adafactor); of a vector with one
    number per expert, kept as a vector of length 1; or a copy of what is common to all. A tensor
    that has no dimension for the experts mixes those of one rank, and is marked so.
    """
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if value.shape == (count,):
        return value[slot : slot + 1]
    if value.shape[0] == count and _is_reduction(value.shape[1:], shape[1:]):
        return value[slot]
    return {_MIXED: count, "value": value}


def _join(values: list, shape: torch.Size, name: str):
    """Inverse of :func:`_take`.

    Raises:
        ValueError: the entry mixes other experts than those that this rank holds.
    """
    first = values[0]
    if isinstance(first, dict):
        if first[_MIXED] != len(values):
            raise ValueError(
                f"the optimizer state of {name} mixes the {first[_MIXED]} experts of a rank (as "
                f"adafactor's does for biases), and a rank now holds {len(values)}: resume on as "
                "many ranks as saved it, or use --reset-optimizer"
            )
        return first["value"]
    if not torch.is_tensor(first) or first.dim() == 0:
        return first
    if first.shape == (1,) != shape[1:]:
        return torch.cat(values)
    if not _is_reduction(first.shape, shape[1:]):
        raise ValueError(
            f"the optimizer state of {name} has shape {tuple(first.shape)}, which is not of one "
            "expert; use --reset-optimizer"
        )
    return torch.stack(values)


def _is_reduction(part: torch.Size, whole: torch.Size) -> bool:
    """Whether a shape is another one without some of its dimensions, but not without all."""
    rest = iter(whole)
    return len(part) > 0 and all(size in rest for size in part)
