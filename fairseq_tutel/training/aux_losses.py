"""Reports of a model's MoE layers (losses, counts, metrics), if the model does not return them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import moe
from ..config import ExchangeConfig
from ..distributed import sum_tensor_over_ranks_
from ..moe.model import moe_layers

COMBINE_METHODS = ("sum", "average")


class AuxLosses:
    """Reports of a model's MoE layers in one forward pass; :func:`collect_aux` makes one.

    All results are empty, and the loss is 0, if the model has no MoE layer. ``layers`` are (name,
    :class:`~fairseq_tutel.moe.MoEAux`) in the order of calls.
    """

    def __init__(self, model: nn.Module, combine: str = "sum"):
        if combine not in COMBINE_METHODS:
            raise ValueError(f"combine={combine!r}: choose one of {', '.join(COMBINE_METHODS)}")
        self.layers: list[tuple[str, moe.MoEAux]] = []
        self.combine = combine
        self._modules = moe_layers(model)
        self._like = next(model.parameters(), torch.zeros(()))
        self._r: list[int] = []  # of each call

    @property
    def loss(self) -> torch.Tensor:
        """The layers' aux losses in one fp32 scalar with gradient, to be weighted by the caller.

        Collective inside :func:`collect_aux` with ``balance_scope="global"`` or ``"update"``. Raise
        RuntimeError if the model has MoE layers, but none was called.
        """
        if not self._modules:
            return torch.zeros((), device=self._like.device)
        if not self.layers:
            raise RuntimeError("no MoELayer was called inside collect_aux")
        self.finish()
        losses = torch.stack([aux.loss for _, aux in self.layers])
        return losses.sum() if self.combine == "sum" else losses.mean()

    @property
    def by_name(self) -> dict[str, moe.MoEAux]:
        """Each layer's report; the last one if the layer was called several times."""
        return dict(self.layers)

    @property
    def load(self) -> dict[str, torch.Tensor]:
        """int64 [E] by layer: choices of each expert by this rank's tokens, before dropping."""
        found: dict[str, torch.Tensor] = {}
        for name, aux in self.layers:
            load_E = aux.load_E.long()
            found[name] = found[name] + load_E if name in found else load_E
        return found

    def metrics_dict(self) -> dict[str, float]:
        """Return fairseq's routing metrics by name: means over the layers, for this rank's tokens.

        :func:`~fairseq_tutel.moe.routing_metrics` describes them. Waits for the device.
        """
        if not self.layers:
            return {}
        means = moe.routing_metrics([aux for _, aux in self.layers]).mean(1)
        return dict(zip(moe.METRIC_NAMES, means.tolist(), strict=True))

    @torch.no_grad()
    def utilisation(self) -> dict[str, float]:
        """Return how evenly all ranks' tokens use the experts: means over the layers. Collective.

        ``moe_util_slot``, ``moe_util_load``, ``moe_util_rank`` and ``moe_drop`` are percentages,
        ``moe_dead`` is a number of experts; :mod:`fairseq_tutel.moe.metrics` has their formulas.
        Waits for the device.
        """
        if not self.layers:
            return {}
        counts_L = [
            moe.routing_counts([aux], self._modules[name].groups, r)
            for (name, aux), r in zip(self.layers, self._r, strict=True)
        ]
        sums = iter(_sum_over_ranks([count for counts in counts_L for count in counts]))
        sums_L = [moe.RoutingCounts(*(next(sums) for _ in counts)) for counts in counts_L]
        means = torch.stack([torch.cat(moe.utilisation(counts)) for counts in sums_L]).mean(0)
        return dict(zip(moe.UTILISATION_NAMES, means.tolist(), strict=True))

    def finish(self) -> None:
        """Add the balance losses that need all ranks' counts; :func:`collect_aux` calls it."""
        names = [name for name, _ in self.layers]
        finished = moe.balance_over_ranks(aux for _, aux in self.layers)
        self.layers = list(zip(names, finished, strict=True))

    def add(self, name: str, aux: moe.MoEAux, call: Mapping[str, Any]) -> None:
        """Take the report of one call of a layer; ``call`` has the call's arguments."""
        self.layers.append((name, aux))
        r = call.get("r")
        if r is None:
            of_step = getattr(call.get("step"), "exchange", None)
            exchange = call.get("exchange") or of_step or self._modules[name].exchange_config
            r = ExchangeConfig.of(exchange).r
        self._r.append(r)


@contextmanager
def collect_aux(model: nn.Module, combine: str = "sum") -> Iterator[AuxLosses]:
    """Collect the aux losses and counts of a model's MoE layers in a forward pass.

    >>> from fairseq_tutel.moe import MoELayer
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), MoELayer(8, num_experts=4))
    >>> x = torch.randn(20, 8)
    >>> with collect_aux(model) as aux:
    ...     loss = model(x).square().mean()
    >>> (loss + 0.01 * aux.loss).backward()
    >>> list(aux.by_name), int(aux.load["1"].sum())  # 20 tokens, 2 experts each
    (['1'], 40)
    >>> sorted(aux.utilisation())
    ['moe_dead', 'moe_drop', 'moe_util_load', 'moe_util_rank', 'moe_util_slot']

    Args:
        model (nn.Module): the model, wrapped or not. Without MoE layers the loss is 0.
        combine (str): ``sum`` (default) or ``average`` (fairseq's default) of the layers' losses.

    Yields:
        AuxLosses: the reports, complete at the end of the block.

    Activation checkpointing recomputes layers after the block, so their losses do not count twice.
    With ``use_reentrant=True`` the losses have no gradient, because torch runs the layers without
    gradients first. Layers inside a module that ``torch.compile`` compiled do not report. The end
    of the block is collective with ``balance_scope="global"`` or ``"update"``.
    """
    found = AuxLosses(model, combine)
    handles = []
    for name, layer in moe_layers(model).items():
        handles += _listen(found, name, layer)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    found.finish()


def _listen(found, name, layer):
    asked = []  # whether the caller wants the second result too; a stack, for nested calls

    def ask(module, args, kwargs):
        asked.append(kwargs.get("return_aux", False))
        # finished outside: a recomputation does not run this hook and must do what this call does
        return args, {"balance_later": not asked[-1], **kwargs, "return_aux": True}

    def take(module, args, kwargs, result):
        y, aux = result
        found.add(name, aux, kwargs)
        return result if asked.pop() else y

    return [
        layer.register_forward_pre_hook(ask, with_kwargs=True),
        layer.register_forward_hook(take, with_kwargs=True),
    ]


def end_update(model: nn.Module) -> None:
    """Forget the load of the update that has ended (``balance_scope="update"``); not collective.

    Call it after each optimizer step, also after a step that was skipped.

    Args:
        model (nn.Module): the model, wrapped or not, with or without MoE layers.
    """
    for layer in moe_layers(model).values():
        layer.update_load.reset()


def update_load_bias(
    model: nn.Module,
    passes: Sequence[AuxLosses],
    held_back: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Move the load biases of a model's MoE layers after an optimizer step. Collective.

    Do not call it for a step that was skipped, for example by a GradScaler after an overflow.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4, load_bias="quantile")
    >>> with collect_aux(layer) as aux:
    ...     loss = layer(torch.randn(20, 8)).square().mean()
    >>> loss.backward()  # ..., optimizer.step()
    >>> update_load_bias(layer, [aux])

    Args:
        model (nn.Module): the model, wrapped or not. Its layers, if it has any, have
            ``load_bias="sign"`` or ``"quantile"``.
        passes (list of AuxLosses): results of :func:`collect_aux` for all passes of the step.
        held_back (dict): fixed biases [E] by layer name and a dot (default None: none), from
            :func:`fairseq_tutel.checkpoint.growth.held_back` after ``checkpoint grow --exact``.

    Raises:
        ValueError: there is no pass, or a pass lacks counts of a layer, as in evaluation.
    """
    layers = moe_layers(model)
    if not layers:
        return
    if not passes:
        raise ValueError("update_load_bias needs the reports of at least one forward pass")
    passes_L = [_bias_counts(layers, found) for found in passes]
    counts_L = [torch.stack(counts).sum(0) for counts in zip(*passes_L, strict=True)]
    held_L = [(held_back or {}).get(f"{name}." if name else "") for name in layers]
    update_load_biases(layers.values(), _sum_over_ranks(counts_L), held_L)


def _bias_counts(layers: Mapping[str, moe.MoELayer], found: AuxLosses) -> list[torch.Tensor]:
    """Return one forward pass's bias counts of each layer; their shapes may differ."""
    counts = {name: aux.bias_counts for name, aux in found.layers}
    known = [count for name in layers if (count := counts.get(name)) is not None]
    if not len(known) == len(found.layers) == len(layers):
        lacking = [name for name in layers if counts.get(name) is None]
        raise ValueError(
            f"a forward pass has {len(found.layers)} reports of {len(layers)} MoE layers, "
            f"without counts of {lacking}: were they in training, with a load_bias?"
        )
    return [count.long() for count in known]


def _sum_over_ranks(counts_L: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return int64 sums over all ranks of tensors of any shapes, in one reduction. Collective."""
    total = torch.cat([counts.flatten().long() for counts in counts_L])
    parts = sum_tensor_over_ranks_(total).split([counts.numel() for counts in counts_L])
    return [part.view(counts.shape) for part, counts in zip(parts, counts_L, strict=True)]


def update_load_biases(
    layers: Iterable[moe.MoELayer],
    counts_L: Iterable[torch.Tensor],
    held_L: Iterable[torch.Tensor | None],
) -> None:
    """Move the load biases by counts that are summed over ranks and passes; not collective.

    Args:
        layers (iterable of MoELayer): the layers to change.
        counts_L (iterable of Tensor): each layer's counts, as ``gate.update_load_bias`` takes them.
        held_L (iterable): each layer's fixed biases [E], or None.
    """
    for layer, counts, held_E in zip(layers, counts_L, held_L, strict=True):
        gate: Any = layer.gate
        gate.update_load_bias(counts, held_E)
