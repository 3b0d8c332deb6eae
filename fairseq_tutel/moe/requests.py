"""Requests to all layers of a model in a forward pass: given choices, reports, recorded choices.

A block of ``fairseq_tutel.training`` opens requests. A layer serves the open ones in each call, in
place of hooks, which a compiled model would not see. A call inside an activation checkpoint notes
its requests there (:mod:`.recomputation`), so that the recomputation repeats the call as it was,
after the block or inside another one. Results of recomputations go to nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from .recomputation import Checkpoint, checkpoints, has_gradients
from .torch_modes import untraced

if TYPE_CHECKING:
    from .layer import MoELayer


@dataclass
class LayerCall:
    """Results of one call of a layer."""

    aux: Any  # MoEAux, if a request or the caller asked for it, else None
    choices: torch.Tensor | None  # [..., K], if a request asked for them
    training: bool
    has_graph: bool  # whether the call ran with gradients enabled
    has_gradients: bool  # or will run so, recomputed by a re-entrant checkpoint

    @property
    def is_hidden(self) -> bool:
        """Whether a recomputation has the gradients of these results."""
        return self.has_gradients and not self.has_graph


@dataclass(eq=False)
class Request:
    """Request of one block to one layer.

    ``arguments`` are those of :meth:`MoELayer.forward` that the caller does not give; the caller
    and inner blocks have priority. A ``recorder`` among them asks for the choices. ``take`` gets
    each call, but no recomputation.
    """

    arguments: Mapping[str, Any]
    take: Callable[[LayerCall, Mapping[str, Any]], Any]  # gets the call's arguments too
    around: list[Checkpoint] = field(default_factory=checkpoints)

    def reaches(self, around: list[Checkpoint]) -> bool:
        """Return whether no recomputation begins between the block and a call."""
        return not any(each.again and self.is_outside(each) for each in around)

    def is_outside(self, checkpoint: Checkpoint) -> bool:
        """Return whether the block was opened before this checkpoint began."""
        return all(checkpoint.notes is not each.notes for each in self.around)


@dataclass(eq=False)
class _Noted:
    """Arguments for recomputations of a call."""

    arguments: dict[str, Any]


class Requests:
    """Requests to one layer. Copies of the layer begin without any.

    Attributes:
        served: whether there are any, open or noted; compiled code has a guard on it.
    """

    def __init__(self):
        self.served = False
        self._open: list[Request] = []
        self._noted: set[weakref.ref] = set()

    def __reduce__(self):
        return Requests, ()

    def open(self, request: Request) -> None:
        """Serve a request from now on."""
        self._open.append(request)
        self._update()

    def close(self, request: Request) -> None:
        """End a request, except for recomputations."""
        self._open.remove(request)
        self._update()

    def _update(self) -> None:
        self.served = bool(self._open or self._noted)

    def of_call(self) -> tuple[list[Request], dict[str, Any]]:
        """Return the requests that get the results of a call made now, and its arguments."""
        around = checkpoints()
        noted = next((each.notes.get(self) for each in around if each.again), None)
        known = {} if noted is None else noted.arguments
        mine = [request for request in self._open if request.reaches(around)]
        for each in takewhile(lambda each: not each.again, around):
            outer = [request for request in mine if request.is_outside(each)]
            self._note(each, _merge(known, outer))
        return mine, _merge(known, mine)

    def _note(self, checkpoint: Checkpoint, arguments: dict[str, Any]) -> None:
        if arguments and self not in checkpoint.notes:
            checkpoint.notes[self] = noted = _Noted(arguments)
            self._noted.add(weakref.ref(noted, self._forget))
            self._update()
        elif arguments and (
            checkpoint.notes[self].arguments.get("choices") is not arguments.get("choices")
        ):
            raise RuntimeError(
                "a layer has other choices in its second call inside one activation checkpoint: "
                "checkpoint each call by itself"
            )

    def _forget(self, noted: weakref.ref) -> None:
        self._noted.discard(noted)
        self._update()


def _merge(arguments: Mapping[str, Any], requests: list[Request]) -> dict[str, Any]:
    merged = dict(arguments)
    for request in requests:  # inner blocks come last
        merged.update(request.arguments)
    return merged


@contextmanager
def open_requests(requests: Mapping[MoELayer, Request]) -> Iterator[None]:
    """Make requests to layers until the end of the block."""
    opened = []
    try:
        for layer, request in requests.items():
            layer.requests.open(request)
            opened.append((layer, request))
        yield
    finally:
        for layer, request in opened:
            layer.requests.close(request)


@untraced  # a trace sees neither Python's stack nor the blocks
def serve(layer: MoELayer, x: torch.Tensor, options: dict[str, Any]) -> Any:
    """Call a layer and serve its requests; ``options`` are the caller's arguments."""
    requests, asked = layer.requests.of_call()
    wants_aux = options["return_aux"]
    if wants_aux:  # the caller says who balances
        asked.pop("balance_later", None)
    if (choices := asked.get("choices")) is not None:
        asked["choices"] = choices.to(x.device)
    found: list[torch.Tensor] = []
    if "recorder" in asked:
        asked["recorder"] = found.append
    given = {name: v for name, v in options.items() if not (v is None or v is False)}
    options = {**options, **asked, **given}
    result = layer._compute(x, **options)
    y, aux = result if options["return_aux"] else (result, None)
    if requests:
        graph = torch.is_grad_enabled()
        chosen = found[0] if found else None
        call = LayerCall(aux, chosen, layer.training, graph, has_gradients())
        for request in requests:
            request.take(call, options)
    return result if wants_aux else y
