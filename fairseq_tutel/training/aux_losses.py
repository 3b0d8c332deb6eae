"""Reports of a model's MoE layers (losses, counts, metrics), if the model does not return them."""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import moe
from ..config import ExchangeConfig
from ..distributed import sum_tensor_over_ranks_
from ..moe.load_bias import zero_counts
from ..moe.model import moe_layers
from ..moe.padding import Padding
from ..moe.requests import LayerCall, Request, open_requests

COMBINE_METHODS = ("sum", "average", "by_token")


class AuxLosses:
    """Reports of a model's MoE layers in one forward pass; :func:`collect_aux` makes one.

    All results are empty, and the loss is 0, if the model has no MoE layer.
    """

    def __init__(self, model: nn.Module, combine: str = "sum"):
        if combine not in COMBINE_METHODS:
            raise ValueError(f"combine={combine!r}: choose one of {', '.join(COMBINE_METHODS)}")
        self.combine = combine
        self._modules = moe_layers(model)
        self._like = next(model.parameters(), torch.zeros(()))
        self._calls: list[tuple[str, LayerCall]] = []
        self._r: list[int] = []  # of each call

    @property
    def layers(self) -> list[tuple[str, moe.MoEAux]]:
        """Each call's layer and its :class:`~fairseq_tutel.moe.MoEAux`, in the order of calls."""
        return [(name, call.aux) for name, call in self._calls]

    @property
    def loss(self) -> torch.Tensor:
        """The layers' aux losses in one fp32 scalar with gradient, to be weighted by the caller.

        Collective inside :func:`collect_aux` with ``balance_scope="global"`` or ``"update"``. Raise
        RuntimeError if the model has MoE layers, but none was called, or if layers ran without
        gradients in training and somebody reads the loss with them.
        """
        if not self._modules:
            return torch.zeros((), device=self._like.device)
        if not self.layers:
            raise RuntimeError("no MoELayer was called inside collect_aux")
        self.finish()
        calls = self._with_graph() if torch.is_grad_enabled() else self._calls
        losses = torch.stack([call.aux.loss for _, call in calls])
        if self.combine == "by_token":
            return (losses * _shares_of_calls(calls)).sum()
        return losses.sum() if self.combine == "sum" else losses.mean()

    def _with_graph(self) -> list[tuple[str, LayerCall]]:
        """Return the calls without those under no_grad in training, whose losses are constants."""
        calls = [(name, call) for name, call in self._calls if call.has_graph or not call.training]
        known = {name for name, _ in calls}
        lost = {name for name, call in self._calls if call.is_hidden or name not in known}
        if lost:
            raise RuntimeError(
                f"the aux loss of layers {sorted(lost)} has no gradient, because they ran under "
                "torch.no_grad: checkpoint them with use_reentrant=False, or, for a value without "
                "gradient, read the loss under torch.no_grad too"
            )
        return calls

    def with_gradients(self) -> list[moe.MoEAux]:
        """Return the reports without those of frozen layers, which ran under no_grad in training.

        Raise RuntimeError if re-entrant checkpointing has hidden the gradients.
        """
        if any(call.is_hidden for _, call in self._calls):
            return [call.aux for _, call in self._with_graph()]  # raises
        return [call.aux for _, call in self._calls if call.has_graph or not call.training]

    @property
    def by_name(self) -> dict[str, moe.MoEAux]:
        """Each layer's report; the last one if the layer was called several times."""
        return dict(self.layers)

    def add(self, name: str, call: LayerCall, options: Mapping[str, Any]) -> None:
        """Take the report of one call of a layer; ``options`` are the call's arguments."""
        self._calls.append((name, call))
        r = options["r"]
        if r is None:
            of_step = getattr(options["step"], "exchange", None)
            exchange = options["exchange"] or of_step or self._modules[name].exchange_config
            r = ExchangeConfig.of(exchange).r
        self._r.append(r)

    @property
    def parallelisms(self) -> list[int]:
        """The r of each call, in the order of :attr:`layers`."""
        return list(self._r)

    @property
    def load(self) -> dict[str, torch.Tensor]:
        """int64 [E] by layer: choices of each expert by this rank's tokens, before dropping."""
        return _sums((name, aux.load_E) for name, aux in self.layers)

    def metrics_dict(self) -> dict[str, float]:
        """Return fairseq's routing metrics by name: means over the layers, for this rank's tokens.

        :func:`~fairseq_tutel.moe.routing_metrics` describes them; ``moe_drop`` is the percentage of
        pairs that were dropped. Waits for the device.
        """
        return moe.metrics_of([aux for _, aux in self.layers]) if self.layers else {}

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

    def detached(self) -> "AuxLosses":
        """Return the reports without the graph of the forward pass, which holds memory."""
        found = copy.copy(self)
        found._calls = [
            (name, dataclasses.replace(call, aux=call.aux.detached())) for name, call in self._calls
        ]
        return found

    def finish(self) -> None:
        """Add the balance losses that need all ranks' counts; :func:`collect_aux` calls it."""
        calls = [call for _, call in self._calls]
        for call, aux in zip(calls, moe.balance_over_ranks(c.aux for c in calls), strict=True):
            call.aux = aux  # also for other blocks around the call

    def bias_counts(self) -> dict[str, torch.Tensor]:
        """Return counts for :func:`update_load_bias` by layer, of calls that get gradients."""
        counted = ((name, call.aux.bias_counts) for name, call in self._calls if call.has_gradients)
        return _sums((name, counts) for name, counts in counted if counts is not None)


@contextmanager
def collect_aux(
    model: nn.Module,
    combine: str = "sum",
    *,
    attention_mask: torch.Tensor | None = None,
    skip_padding: bool = False,
) -> Iterator[AuxLosses]:
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
        combine (str): ``sum`` (default) or ``average`` (fairseq's default) of the layers' losses;
            ``by_token``: sum over the layers of each layer's mean over its calls, by their tokens.
        attention_mask (Tensor): bool or integers [B, T], 0 for padding, which losses, load, load
            biases and metrics leave out (default None: all tokens count). Layers that get other
            tokens than [B, T, M] or [B * T, M] count all of theirs.
        skip_padding (bool): padding goes to no expert (default False: it is routed).

    Yields:
        AuxLosses: the reports, complete at the end of the block.

    Layers that activation checkpointing recomputes do not count twice. With ``use_reentrant=True``
    reading the loss raises RuntimeError: torch runs the layers without gradients first, so the
    loss has none. In a compiled model the layers run uncompiled inside the block. The end of the
    block is collective with ``balance_scope="global"`` or ``"update"``. It raises ValueError if no
    layer got the tokens of ``attention_mask``.
    """
    found = AuxLosses(model, combine)
    # balanced outside of the call: a recomputation has no part in that
    arguments: dict[str, Any] = {"return_aux": True, "balance_later": True}
    padding = None if attention_mask is None else Padding(attention_mask, skip_padding)
    if padding is not None:
        arguments["padding"] = padding
    layers = moe_layers(model).items()
    asked = {layer: Request(arguments, partial(found.add, name)) for name, layer in layers}
    with open_requests(asked):
        yield found
    if padding is not None and found.layers and not padding.fits:
        raise ValueError(f"no MoE layer gets tokens {list(padding.pad_BT.shape)} of attention_mask")
    found.finish()


def end_update(model: nn.Module) -> None:
    """Forget the load of the update that has ended (``balance_scope="update"``); not collective.

    Call it after each optimizer step, also after a step that was skipped.

    Args:
        model (nn.Module): the model, wrapped or not, with or without MoE layers.
    """
    for layer in moe_layers(model).values():
        layer.update_load.reset()


def update_load_bias(model: nn.Module, passes: Sequence[AuxLosses]) -> None:
    """Move the load biases of a model's MoE layers after an optimizer step. Collective.

    Do not call it for a step that was skipped, for example by a GradScaler after an overflow.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4, load_bias="quantile")
    >>> with collect_aux(layer) as aux:
    ...     loss = layer(torch.randn(20, 8)).square().mean()
    >>> loss.backward()  # ..., optimizer.step()
    >>> update_load_bias(layer, [aux])

    Args:
        model (nn.Module): the model, wrapped or not. Biases of layers with ``load_bias="sign"`` or
            ``"quantile"`` move, unless no pass called the layer.
        passes (list of AuxLosses): results of :func:`collect_aux` for all passes of the step.
            Passes without gradient do not count; several calls of a layer are summed.

    Raises:
        ValueError: no pass has counts, as in evaluation, or no layer has such a bias.
    """
    layers = moe_layers(model)
    if not layers:
        return
    moving = {name: layer for name, layer in layers.items() if layer.config.moves_load_bias}
    counts_L = [found.bias_counts() for found in passes]
    if not any(name in counts for name in moving for counts in counts_L):
        raise ValueError(
            f"update_load_bias needs at least one forward pass in training with gradients; the "
            f"{len(passes)} given have no counts of layers with a moving load_bias, {list(moving)}"
        )
    sums_L = [
        sum((counts[name] for counts in counts_L if name in counts), zero_counts(layer.gate))
        for name, layer in moving.items()
    ]
    for layer, counts in zip(moving.values(), _sum_over_ranks(sums_L), strict=True):
        gate: Any = layer.gate
        gate.update_load_bias(counts)


def _sums(counts_of: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return int64 sums of the counts under each name."""
    found: dict[str, torch.Tensor] = {}
    for name, counts in counts_of:
        found[name] = found[name] + counts if name in found else counts.long()
    return found


def _shares_of_calls(calls: Sequence[tuple[str, LayerCall]]) -> torch.Tensor:
    """Return each call's share of the tokens of its layer's calls, fp32."""
    kind: Any = {"dtype": torch.float32, "device": calls[0][1].aux.loss.device}
    tokens = torch.stack([torch.as_tensor(call.aux.num_tokens, **kind) for _, call in calls])
    names = list(dict.fromkeys(name for name, _ in calls))
    layer = torch.tensor([names.index(name) for name, _ in calls], device=tokens.device)
    return tokens / tokens.new_zeros(len(names)).index_add(0, layer, tokens).clamp(min=1)[layer]


def _sum_over_ranks(counts_L: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return int64 sums over all ranks of tensors of any shapes, in one reduction. Collective."""
    total = torch.cat([counts.flatten().long() for counts in counts_L])
    parts = sum_tensor_over_ranks_(total).split([counts.numel() for counts in counts_L])
    return [part.view(counts.shape) for part, counts in zip(parts, counts_L, strict=True)]
