"""Optimizer state by parameter name, one entry per expert, and back.

The state of a stacked parameter is split into one state per expert, under the name of the expert's
weight in a checkpoint, so each expert's moments follow it to any rank. A slice of an expert has a
slice of the state: :func:`.transforms.join_slices` joins it for files, loading cuts it out again.

fp32 copies of half-precision weights (fairseq's ``--fp16`` and ``--bf16``) are part of the state.
New copies made from the half weights would lose the rounded bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...distributed import shard_like, slice_dim, take_slice, whole_shape
from ...moe.experts import ExpertBank
from ..matrices import ExpertMatrix
from .sharded_optimizer import own_optimizer_state, whole_optimizer_state

# one or several, each of which steps some parameters of a model
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

FreshState = Callable[[torch.optim.Optimizer], dict[int, dict[str, Any]] | None]

# entry of a parameter's state: the fp32 copy that a mixed-precision optimizer steps
_MASTER = "fp32_weight"


def named_state(
    optimizers: Optimizers,
    model: nn.Module,
    what: str | None = None,
    fresh: FreshState | None = None,
) -> dict[str, Any]:
    """Join the results of :meth:`StateNames.to_named` of all optimizers; groups in their order.

    With ``what``, the operation's name for errors, rank 0 gathers the state of all dense
    parameters; without it each rank has its own part of a sharded optimizer's state. ``fresh``
    gives the state to use in place of an optimizer's, or None.
    """
    named: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    held: set[str] = set()
    for optimizer in as_list(optimizers):
        names = StateNames.of_optimizer(optimizer, model)
        if both := held.intersection(names):
            raise ValueError(f"two optimizers hold {min(both)}: a checkpoint has one state of each")
        held.update(names)
        state = optimizer.state_dict()
        if fresh is not None and (made := fresh(optimizer)) is not None:
            state = {**state, "state": made}
        part = names.to_named(
            state if what is None else whole_optimizer_state(optimizer, state, what)
        )
        named |= part["named_state"]
        groups += part["param_groups"]
    return {"named_state": named, "param_groups": groups, "loss_scale": None}


def load_named_state(optimizers: Optimizers, model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Load a result of :func:`named_state` into as many optimizers over the same parameters."""
    optimizers, groups = as_list(optimizers), list(stored["param_groups"])
    for optimizer in optimizers:
        names = StateNames.of_optimizer(optimizer, model)
        count = len(groups) if optimizer is optimizers[-1] else len(optimizer.param_groups)
        mine = {name: stored["named_state"].get(name) for name in names}
        part = {
            "named_state": {n: s for n, s in mine.items() if s is not None},
            "param_groups": groups[:count],
        }
        del groups[:count]
        whole = names.from_named(part, optimizer.state_dict())
        optimizer.load_state_dict(own_optimizer_state(optimizer, whole))


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


class StateNames:
    """Names of an optimizer's parameters in the optimizer's own order; nothing is collective.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=2)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> names = StateNames.of_optimizer(optimizer, layer)
    >>> list(names)[:3]
    ['gate.wg.weight', 'experts.0.fc1.weight', 'experts.1.fc1.weight']
    >>> sorted(names.to_named(optimizer.state_dict()))
    ['loss_scale', 'named_state', 'param_groups']

    Args:
        params (iterable of Tensor): the parameters in the order of ``optimizer.state_dict()``.
        modules (dict): prefix -> module; every parameter is in one of them. A model has prefix "".
        copies (iterable): (parameter of a module, copy that the optimizer steps in its place)
            (default: none).
        otherwise (str): advice for errors about state that does not fit (default: load the weights
            alone).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        modules: Mapping[str, nn.Module],
        copies: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
        otherwise: str = "load the weights alone, without the optimizer",
    ):
        names: dict[int, str] = {}
        self._otherwise = otherwise
        self._single: dict[str, list[str]] = {}
        self._slices: dict[str, tuple[int, int]] = {}
        for prefix, module in modules.items():
            for name, param in module.named_parameters():
                names[id(param)] = prefix + name
            for path, child in module.named_modules():
                if isinstance(child, ExpertBank):
                    path = f"{prefix}{path}." if path else prefix
                    for stacked, single in child.single_names().items():
                        self._single[path + stacked] = [path + name for name in single]
                        self._slices[path + stacked] = child.hidden_slice
        self._masters: dict[str, torch.Tensor] = {}
        for original, copy in copies:
            names[id(copy)] = names[id(original)]
            self._masters[names[id(original)]] = copy.detach()
        self._params: dict[str, torch.Tensor] = {}
        for param in params:
            if isinstance(param, ExpertMatrix) and id(param.stack) in names:
                names[id(param)] = self._single[names[id(param.stack)]][param.index]
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is in "
                    "none of the modules that are saved"
                )
            self._params[names[id(param)]] = param

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> StateNames:
        """Return the names for any torch optimizer over parameters of a model."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return cls(params, {"": model})

    def __iter__(self) -> Iterator[str]:
        """Yield the names in a checkpoint."""
        for name in self._params:
            yield from self._single.get(name, [name])

    def to_named(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert torch's form into ``named_state``, ``param_groups`` and ``loss_scale``.

        A parameter without state (a frozen one) gets an empty state, if any parameter has state.
        """
        order = list(self._params)
        states = {order[index]: state for index, state in state_dict["state"].items()}
        for name in order if states else ():
            states.setdefault(name, {})
        for name, master in self._masters.items():
            states[name] = {**states.get(name, {}), _MASTER: master}
        named: dict[str, dict[str, Any]] = {}
        for name, state in states.items():
            single = self._single.get(name)
            if single is None:
                named[name] = state
                continue
            for slot, expert_name in enumerate(single):
                named[expert_name] = {
                    key: _take(value, slot, len(single), self._params[name].shape)
                    for key, value in state.items()
                }
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            del group["params"]
        loss_scale = state_dict.get("loss_scale")
        return {"named_state": named, "param_groups": groups, "loss_scale": loss_scale}

    def from_named(self, stored: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        """Convert back to torch's form, for ``optimizer.load_state_dict``.

        ``current``, the optimizer's own ``state_dict()``, gives the numbering of its groups. Raise
        ValueError if state is missing or does not fit, or the number of groups differs.
        """
        groups = stored["param_groups"]
        if len(groups) != len(current["param_groups"]):
            raise ValueError(
                f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has "
                f"{len(current['param_groups'])}; {self._otherwise}"
            )
        named = stored["named_state"]
        states = {i: self._state(n, named) for i, n in enumerate(self._params if named else ())}
        result = {
            "state": {index: state for index, state in states.items() if state},
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
        """Restore the fp32 copies that :meth:`to_named` stored, if there are any."""
        for name, master in self._masters.items():
            states = self._stored(name, stored["named_state"])
            parts = [(state or {}).get(_MASTER) for state in states]
            if all(part is not None for part in parts):
                master.copy_(self._entry(name, parts))

    def _stored(self, name: str, named: Mapping[str, Any]) -> list[Any]:
        """Return the stored states of one parameter or of its experts; None for a missing one."""
        return [named.get(key) for key in self._single.get(name, [name])]

    def _state(self, name: str, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter without its fp32 copy."""
        parts = self._stored(name, named)
        if any(part is None for part in parts) or len({bool(part) for part in parts}) > 1:
            raise ValueError(f"the checkpoint has no optimizer state for {name}; {self._otherwise}")
        keys = [key for key in parts[0] if key != _MASTER]
        return {key: self._entry(name, [part[key] for part in parts]) for key in keys}

    def _entry(self, name: str, values: list):
        """Return one entry of a parameter's state, joined from its experts' entries."""
        param = self._params[name]
        if name not in self._single:
            return shard_like(values[0], param) if torch.is_tensor(values[0]) else values[0]
        try:
            return _join([self._slice(name, value) for value in values], param.shape)
        except ValueError as error:
            raise ValueError(f"the optimizer state of {name} {error}; {self._otherwise}") from None

    def _slice(self, name: str, value):
        """Return this rank's slice of an entry of a whole expert's state."""
        index, count = self._slices[name]
        single, shape = self._single[name][0], self._params[name].shape[1:]
        if count == 1 or slice_dim(single) is None:
            return value
        if torch.is_tensor(value):
            if value.shape == whole_shape(shape, single, count):
                return take_slice(value, single, index, count)
            if value.shape == shape or value.numel() == 1:  # from to_named(), not a file; a scale
                return value
        elif not isinstance(value, dict):
            return value
        raise ValueError(
            f"mixes the hidden units of an expert, of which this rank has slice {index} of {count}"
        )


# key of a state entry that all experts of a rank share; its value is their number
_MIXED = "over_experts"


def _take(value, slot: int, count: int, shape: torch.Size):
    """Return one expert's share of an entry in the state of a stacked parameter.

    Moments, and their means over some dimensions (Adafactor), are indexed by the expert. A number
    per expert becomes a vector of length 1. Other entries mix the experts of one rank, and are
    marked so.
    """
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return {_MIXED: count, "value": value}
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if value.shape == (count,):
        return value[slot : slot + 1]
    if value.shape[0] == count and _is_reduction(value.shape[1:], shape[1:]):
        return value[slot]
    return {_MIXED: count, "value": value}


def _join(values: list, shape: torch.Size):
    """Invert :func:`_take`."""
    first = values[0]
    if isinstance(first, dict):
        if first[_MIXED] != len(values):
            raise ValueError(
                f"mixes the {first[_MIXED]} experts of a rank (as adafactor's does for biases), "
                f"and a rank now holds {len(values)}: resume on as many ranks as saved it"
            )
        return first["value"]
    if not torch.is_tensor(first) or first.dim() == 0:
        return first
    if first.shape == (1,) and shape[1:] != (1,):  # a number per expert
        return torch.cat(values)
    if not _is_reduction(first.shape, shape[1:]):
        raise ValueError(f"has shape {tuple(first.shape)}, which is not of one expert")
    return torch.stack(values)


def _is_reduction(part: torch.Size, whole: torch.Size) -> bool:
    """Return whether ``part`` is ``whole`` without some of its dimensions, or with 1 there."""
    if len(part) == len(whole) > 1:
        return all(size in (1, full) for size, full in zip(part, whole, strict=True))
    rest = iter(whole)
    return len(part) > 0 and all(size in rest for size in part)
