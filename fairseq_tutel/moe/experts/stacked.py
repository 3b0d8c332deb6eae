"""Banks with stacked weights: one tensor holds the weights of all local experts.

All experts of a rank are then one batched (or grouped) matrix product. In state dicts every expert
has tensors of its own, ``{j}.fc1.weight`` with j the local index.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ... import distributed, ops
from ...backends._torch_private import set_parameters
from ...config import Options
from ..torch_modes import untraced
from .base import ExpertBank, ExpertRows, PreparedExperts

_gather_weights = untraced(distributed.gather_weights)  # a trace does not see collectives


class Stacked:
    """Layout of a parameter that holds tensors of all local experts.

    Args:
        dims: dimensions of one expert's tensor: ``FM``, ``MF``, ``F`` or ``M``. Slices are cut
            along F. A tensor without F is added to the output.
        names: LAYER.KIND of the tensors of one expert; n of them are neighbours, [e*n, ...].
        sizes: of other letters in ``dims``.
    """

    def __init__(self, dims: str, *names: str, **sizes: int):
        self.dims, self.names, self.sizes = dims, names, sizes
        self.slice_dim = dims.index("F") if "F" in dims else None

    def shape(self, model_dim: int, hidden_dim: int) -> tuple[int, ...]:
        sizes = {"M": model_dim, "F": hidden_dim, **self.sizes}
        return tuple(sizes[letter] for letter in self.dims)


def ffn_layout(*firsts: str, bias: bool = True) -> dict[str, Stacked]:
    """Return the layout of a network whose first projections, neighbours, have these names."""
    layout = {
        "fc1_weight": Stacked("FM", *(f"{first}.weight" for first in firsts)),
        "fc1_bias": Stacked("F", *(f"{first}.bias" for first in firsts)),
        "fc2_weight": Stacked("MF", "fc2.weight"),
        "fc2_bias": Stacked("M", "fc2.bias"),
    }
    return {name: each for name, each in layout.items() if bias or not name.endswith("bias")}


def _declare(layout: Mapping[str, Stacked]) -> None:
    for stacked in layout.values():
        distributed.declare_slices(dict.fromkeys(stacked.names, stacked.slice_dim))


class StackedExperts(ExpertBank):
    """Base class of banks with stacked parameters; a subclass gives ``layout`` and ``compute``.

    The initial weights of an expert depend only on its global index and ``seed``, not on the number
    of ranks. They are uniform within 1/sqrt(last dimension of the layer's weight) of zero, as in
    nn.Linear.

    Args, beside those of :class:`~fairseq_tutel.moe.MoELayer`:
        expert_ids: global indices of the local experts.
        draw_on_cpu: draw the weights on the CPU, so that they are the same on every device
            (default True). False takes seconds instead of minutes for billions of weights.
        hidden_slice: (s, S): hold slice s of S of each expert's hidden units (default (0, 1)).
        num_holders: ranks that hold these experts, or slices of them (default 1).
        options: of the network: its ``Options``, or a dict by name (default None: defaults).
    """

    # stacked parameters by name, in the order of PreparedExperts.params
    layout: dict[str, Stacked]
    can_be_gathered = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        _declare(cls.__dict__.get("layout", {}))

    def __init__(
        self,
        expert_ids: Sequence[int],
        model_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
        seed: int | None = None,
        draw_on_cpu: bool = True,
        hidden_slice: tuple[int, int] = (0, 1),
        num_holders: int = 1,
        options: Options | Mapping[str, Any] | None = None,
    ):
        super().__init__()
        for p in (activation_dropout, dropout):
            ops.check_activation(activation, p)
        if model_dim < 1 or hidden_dim < 1:
            raise ValueError(f"model_dim={model_dim}, hidden_dim={hidden_dim}: both must be >= 1")
        self.options = self.read_options(options)
        self.layout = self.layout_for(self.options)  # hides the class's
        _declare(self.layout)
        self.expert_ids = tuple(expert_ids)
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.draw_on_cpu = draw_on_cpu
        self.model_dim = model_dim
        self.hidden_dim = hidden_dim
        self.hidden_slice = hidden_slice
        self.num_holders = num_holders
        units = distributed.slice_size(hidden_dim, hidden_slice[1])
        for name, stacked in self.layout.items():
            count = len(self.expert_ids) * len(stacked.names)
            values = torch.empty((count, *stacked.shape(model_dim, units)))
            self.register_parameter(name, nn.Parameter(values))
        self.mark()
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        self.reset_parameters(seed)

    @classmethod
    def read_options(cls, given: Options | Mapping[str, Any] | None) -> Options:
        """Return the network's options, from an object or by name."""
        return given if isinstance(given, Options) else cls.Options(**(given or {}))

    @classmethod
    def layout_for(cls, options: Options) -> dict[str, Stacked]:
        """Return the stacked parameters that these options ask for."""
        return cls.layout

    @classmethod
    def count(
        cls, model_dim: int, hidden_dim: int, options: Options | Mapping[str, Any] | None = None
    ) -> tuple[int, int]:
        """Return the number of parameters of one expert, and FLOPs per row of its forward pass."""
        numbers = in_matrices = 0
        for stacked in cls.layout_for(cls.read_options(options)).values():
            size = len(stacked.names) * math.prod(stacked.shape(model_dim, hidden_dim))
            numbers += size
            in_matrices += size if len(stacked.dims) == 2 else 0
        return numbers, 2 * in_matrices

    def kept_per_row(self, model_dim: int) -> int:
        return self.count(model_dim, self.hidden_dim, self.options)[1] // 2 // model_dim

    def mark(self) -> None:
        for name, stacked in self.layout.items():
            slices = 1 if stacked.slice_dim is None else self.hidden_slice[1]
            distributed.mark_expert(getattr(self, name), self.num_holders // slices)

    @torch.no_grad()
    def reset_parameters(self, seed: int, names: Sequence[str] = ()) -> None:
        """Draw these stacked parameters, or all, by expert; do nothing on the meta device."""
        names = names or list(self.layout)
        first = getattr(self, names[0])
        if first.is_meta:
            return
        device = torch.device("cpu") if self.draw_on_cpu else first.device
        for slot, expert in enumerate(self.expert_ids):
            generator = torch.Generator(device).manual_seed(seed + expert)
            fan_in: dict[str, int] = {}
            for name in names:
                stacked = self.layout[name]
                shape = stacked.shape(self.model_dim, self.hidden_dim)
                for number, single in enumerate(stacked.names):
                    bound = 1 / math.sqrt(fan_in.setdefault(single.split(".")[0], shape[-1]))
                    values = torch.empty(shape, device=device)
                    values.uniform_(-bound, bound, generator=generator)
                    mine = distributed.take_slice(values, single, *self.hidden_slice)
                    getattr(self, name)[slot * len(stacked.names) + number].copy_(mine)

    def forward(self, batch: ExpertRows, prepared: PreparedExperts | None = None) -> torch.Tensor:
        prepared = self.prepare(batch.rows.dtype) if prepared is None else prepared
        given = prepared, batch.rows, batch.offsets
        if self.memory.outputs or not torch.is_grad_enabled():
            return self.compute(*given)
        return checkpoint(self.compute, *given, use_reentrant=False)

    def compute(
        self, prepared: PreparedExperts, rows: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the network on :class:`ExpertRows`; differentiable.

        Rows after the last expert's may come out with any values.
        """
        raise NotImplementedError

    def without_weights(self) -> StackedExperts:
        """Return a bank of the same experts on the meta device."""
        bank = copy.copy(self)
        params = {
            name: nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
            for name, param in self.named_parameters(recurse=False)
        }
        set_parameters(bank, params)
        return bank

    def make_network(self, dropout: tuple[float, float], part: int) -> Any:
        """Return the network that computes in place of :meth:`compute`; None (default): none."""
        return None

    def prepare(
        self,
        dtype: torch.dtype,
        parallelism: distributed.ExpertParallelism | None = None,
        travels: bool = False,
    ) -> PreparedExperts:
        # slices leave dropout of the output to the tokens' rank: it must not depend on r
        dropout = (self.activation_dropout, self.dropout) if self.training else (0.0, 0.0)
        self._refuse_reparametrized(during_call=True)
        params = tuple(getattr(self, name).to(dtype) for name in self.layout)
        at_source, part = 0.0, 0
        if parallelism is not None and not parallelism.is_replicated:
            dims = [stacked.slice_dim for stacked in self.layout.values()]
            params, part = _gather_weights(params, dims, parallelism), parallelism.part
            if parallelism.groups.placement == "sliced":
                dropout, at_source = (dropout[0], 0.0), dropout[1]
        return PreparedExperts(params, dropout, at_source, part, self.make_network(dropout, part))

    @staticmethod
    def product(
        rows: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``rows @ weight.T + bias`` of each expert. NOTE: the host reads ``offsets``.

        [e, N, A], [e, B, A] and [e, B] -> [e, N, B]. With ``offsets``, int32 [e], the end of each
        expert's rows: [R, A] -> [R, B], zero after the last one.
        """
        if offsets is None:
            out = torch.bmm(rows, weight.transpose(1, 2))
            return out if bias is None else out + bias[:, None]
        if torch.compiler.is_compiling():  # a graph does not know the offsets
            return ops.grouped_linear(rows, weight, offsets, bias)
        *parts, rest = rows.tensor_split(offsets.tolist())
        biases = [None] * len(parts) if bias is None else bias
        products = map(functional.linear, parts, weight, biases)
        return torch.cat([*products, rows.new_zeros((len(rest), weight.shape[1]))])

    def single_names(self) -> dict[str, list[str]]:
        slots = range(len(self.expert_ids))
        return {
            name: [f"{slot}.{single}" for slot in slots for single in stacked.names]
            for name, stacked in self.layout.items()
        }

    def _refuse_reparametrized(self, during_call: bool = False) -> None:
        """Raise ValueError for a parametrized weight: state dicts would not hold its originals.

        peft parametrizes the weights that it adapts during each call, and only then.
        """
        for name in self.layout:
            if name not in self._parameters and not (during_call and self._adapted_by_peft(name)):
                raise ValueError(
                    f"experts.{name} is no parameter any more, as after torch.nn.utils.prune or "
                    "parametrizations: change the values of stacked experts in place instead, or "
                    "adapt them by fairseq_tutel.training.add_lora"
                )

    def _adapted_by_peft(self, name: str) -> bool:
        added = getattr(self, "parametrizations", {})
        return name in added and type(added[name][-1]).__module__.startswith("peft.")

    def _singles(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._refuse_reparametrized()
        for name, singles in self.single_names().items():
            yield from zip(singles, getattr(self, name), strict=True)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for single, part in self._singles():
            destination[prefix + single] = part if keep_vars else _by_itself(part.detach())

    def __getattr__(self, name):
        """Return an expert's tensors as attributes, for programs that follow state dict names."""
        if not name.isdigit():
            return super().__getattr__(name)
        expert = _Tensors(f"experts.{name}")
        for single, part in self._singles():
            slot, layer, kind = single.split(".")
            if slot == name:
                if layer not in vars(expert):
                    setattr(expert, layer, _Tensors(f"experts.{name}.{layer}"))
                setattr(getattr(expert, layer), kind, part)
        return expert

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        parts = dict(self._singles())
        shapes = {single: part.shape for single, part in parts.items()}
        reports = missing_keys, unexpected_keys, error_msgs
        found = fitting_tensors(shapes, self.hidden_slice, state_dict, prefix, strict, *reports)
        if local_metadata.get("assign_to_params_buffers", False):
            for name, singles in self.single_names().items():
                if all(single in found for single in singles):
                    values = torch.stack([found[single].detach() for single in singles])
                    trained = getattr(self, name).requires_grad
                    self._parameters[name] = nn.Parameter(values, requires_grad=trained)
            self.mark()
            return
        for single, value in found.items():
            if parts[single].is_meta and not value.is_meta:
                warnings.warn(
                    f"{prefix}{single}: copying into a parameter on the meta device does nothing; "
                    "call load_state_dict with assign=True",
                    stacklevel=2,
                )
            parts[single].detach().copy_(value)

    def extra_repr(self) -> str:
        index, slices = self.hidden_slice
        part = f" (slice {index} of {slices})" if slices > 1 else ""
        return (
            f"local={len(self.expert_ids)}, ids={self.expert_ids[0]}..{self.expert_ids[-1]}, "
            f"model_dim={self.model_dim}, hidden_dim={self.hidden_dim}{part}"
        )


def fitting_tensors(
    shapes: Mapping[str, torch.Size], hidden_slice, state_dict, prefix, strict, *reports: list[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of these names and shapes, or their slices; report all others."""
    missing_keys, unexpected_keys, error_msgs = reports
    found = {}
    for single, shape in shapes.items():
        key = prefix + single
        value = state_dict.get(key)
        if value is None:
            missing_keys.append(key)
            continue
        # a state dict holds whole experts, or only the slice that is here
        if value.shape == distributed.whole_shape(shape, single, hidden_slice[1]):
            value = distributed.take_slice(value, single, *hidden_slice)
        if value.shape == shape:
            found[single] = value
        else:
            error_msgs.append(
                f"size mismatch for {key}: {tuple(value.shape)} in the checkpoint, "
                f"{tuple(shape)} in the model"
            )
    if strict:
        wanted = {prefix + single for single in shapes}
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in wanted]
    return found


class _Tensors:
    """Tensors of one expert by the names of a state dict; a view, not a module."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self):
        # programs that take it for a module quote it in their errors
        return (
            f"<{self._name}: parts of stacked parameters; use the names of named_parameters(), or "
            "load_state_dict()>"
        )

    def __getattr__(self, name):
        raise AttributeError(f"{self!r} has no {name!r}")


def _by_itself(part: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own: safetensors refuses parts of a storage."""
    if type(part) is not torch.Tensor or part.is_meta or not part.is_contiguous():
        return part
    begin = part.storage_offset() * part.element_size()
    storage = part.untyped_storage()[begin : begin + part.nbytes]
    return part.new_empty(0).set_(storage, 0, part.shape, part.stride())
