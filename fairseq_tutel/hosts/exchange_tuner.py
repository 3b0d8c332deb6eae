"""While training: which exchange is fastest, tried and measured in the steps themselves.

    tuner = hosts.ExchangeTuner(layers)             # all ranks; "algorithm" and "overlap_degree"
    for x, f in batches:
        step = tuner.agree(len(x), x.dtype, capacity_factor=f)   # for all layers of the pass
        for layer in layers:
            x = layer(x, step=step, capacity_factor=f)
        loss(x).backward()

The agreement of a step, one small all-gather as ever, carries what the ranks measured; each runs
the same state machine (:mod:`fairseq_tutel.tuning`) on the same integers, so that nothing else is
sent. Evaluation takes the layers' own exchange: it is a small part of a run, has no backward pass,
and its losses should not depend on times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..config import ExchangeConfig
from ..distributed import (
    StepAgreement,
    gather_texts,
    make_flow,
    refuse_differences,
    sync_step_of_all,
)
from ..moe import MoELayer, RegionTimer
from ..moe.wire import row_bytes
from ..tuning import WINDOW, Event, Key, Pinned, Space, Tuner, dump, load
from .exchange_choices import (
    alike,
    as_measured_on_rank_0,
    build_choices,
    free_memory,
    signature,
)

TUNED = ("algorithm", "overlap_degree")

logger = logging.getLogger(__name__)


class ExchangeTuner:
    """Chooses the exchange of every training step of layers that are alike.

    Building it is a collective call of all ranks, and so is every :meth:`agree`: all ranks make as
    many forward passes, with the same options.

    Args:
        layers: of one width, number of experts and exchange; they are measured together.
        tuned: fields of :class:`~fairseq_tutel.config.ExchangeConfig` to choose, of ``TUNABLE``;
            the others stay as the layers have them.
        steps: of a trial, the first of which is not measured.
        max_loss: part of the run's time that trials may cost before no further one begins.
        pinned: text of :meth:`file` (or of a checkpoint): its choices are taken, nothing is
            measured, and so no rounding depends on times.

    Attributes:
        space: what can be chosen.
        signature: what times depend on: ranks, nodes, device, versions.

    Raises:
        ValueError: layers that differ, an unknown field, or a file that does not fit.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        tuned: Sequence[str] = TUNED,
        *,
        steps: int = 5,
        max_loss: float = 0.02,
        pinned: str | None = None,
    ):
        self._layer = alike(layers)
        self._base = self._layer.exchange_config
        axes, self._serves = build_choices(layers, tuned)
        self.space = Space(axes, self._instead)
        self.signature = signature(self._layer)
        self._tuner = Tuner(
            self.space,
            steps=steps,
            max_loss=max_loss,
            fits=lambda key, choice: self._fits(choice),
            start=lambda key: self._start(),
        )
        self._measured = as_measured_on_rank_0(self._layer)
        self._num_layers = len(layers)
        self._device = next(self._layer.parameters()).device
        self._measures_memory = "r" in tuned
        self._free = 0  # bytes, on the rank that has least
        self._itemsize = 4
        self._exchanges: dict[tuple, ExchangeConfig] = {}
        self._num_parameters = sum(param.numel() for param in self._layer.experts.parameters())
        self._others: list = []
        self._pinned = None if pinned is None else _pinned(pinned, self.space, self.signature)
        self._told: set[str] = set()  # kinds of keys that the file does not have
        self._timers: dict[int, RegionTimer] = {}
        self._last: RegionTimer | None = None  # of the last step
        self._began: int | None = None
        self._load = 0  # most rows to an expert in the step before, on any rank
        self._bytes = 0

    @property
    def is_pinned(self) -> bool:
        """Whether the choices are those of a file."""
        return self._pinned is not None

    def agree(
        self,
        num_tokens: int,
        dtype: torch.dtype,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
    ) -> StepAgreement:
        """The agreement of one forward pass, with the exchange that its layers use.

        Args:
            num_tokens: T of this rank.
            dtype: of the experts' rows.
            top_k, capacity_factor: as given to the layers' calls.
        """
        layer, options = self._layer, {"top_k": top_k, "capacity_factor": capacity_factor}
        settings = layer.step_settings(dtype, **options)
        if not layer.groups.agrees:
            return StepAgreement(num_tokens, settings)
        words = [num_tokens, *self._words()]
        step, table = sync_step_of_all(num_tokens, settings, layer.groups, words)
        self._settle([line[1:] for line in table])
        if not layer.training:
            self._began = None  # of the time of a run, evaluation is no part
            return step
        # of all ranks, not only of those that exchange tokens: a choice is that of all
        capacity, is_fixed = self._capacity(max(line[0] for line in table), settings)
        row = row_bytes(self._base, layer.model_dim, dtype)
        self._bytes = settings.num_experts * capacity * row
        self._itemsize = dtype.itemsize
        order = self._order(Key.of("train", _name(dtype), self._sizes(settings.top_k), capacity))
        exchange = self._exchange(order[0])
        timer = self._timer(*order[1:], is_fixed)
        settings = dataclasses.replace(settings, exchange=exchange)
        return dataclasses.replace(step, settings=settings, exchange=exchange, timer=timer)

    def take_events(self) -> list[Event]:
        """Trials and decisions since they were last taken; the same on all ranks."""
        return self._tuner.take_events()

    @property
    def milliseconds(self) -> float | None:
        """Of all layers in the last step that was measured, of the fastest rank."""
        last = self._tuner.last_sample
        return None if last is None else last / 1000

    def file(self) -> str:
        """JSON text with all that is known, for a checkpoint or ``pinned``."""
        return dump(self._tuner, self.signature, self._others)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the same on all ranks."""
        return {"file": self.file(), "load": self._load}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; all ranks from the same one.

        Raises:
            ValueError: not such a state.
        """
        if state is None:
            return
        self._load = state["load"]
        if not self.is_pinned:
            self._others = load(state["file"], self._tuner, self.signature)

    def _exchange(self, choice) -> ExchangeConfig:
        """Made once: a step that is not tried or measured shall cost nothing."""
        values = tuple(choice.values())
        if values not in self._exchanges:
            self._exchanges[values] = dataclasses.replace(self._base, **choice)
        return self._exchanges[values]

    def _capacity(self, num_tokens, settings) -> tuple[int, bool]:
        """Rows of an expert and rank, and whether they are the same whatever the tokens are."""
        config = self._layer.config
        options = {"top_k": settings.top_k, "capacity_factor": settings.capacity_factor}
        if any(getattr(config, name) != value for name, value in options.items()):
            config = dataclasses.replace(config, **options)
        if config.is_static(training=True) and not self._base.wire_compact:
            return config.capacity(num_tokens, training=True), True
        return self._load or settings.top_k * num_tokens // settings.num_experts, False

    def _sizes(self, top_k) -> str:
        layer = self._layer
        sizes = f"M{layer.model_dim} E{layer.groups.num_experts}"
        return f"{sizes} K{top_k} P{self._num_parameters}"

    # the integers of a step

    def _words(self) -> list[int]:
        now = time.perf_counter_ns()
        elapsed = 0 if self._began is None else (now - self._began) // 1000
        self._began = now
        self._timers = {n: self._timers[n] for n in self._tuner.awaited if n in self._timers}
        known = {number: timer.microseconds for number, timer in self._timers.items()}
        measured = {number: us for number, us in known.items() if us is not None}
        load, self._last = 0 if self._last is None else self._last.load, None
        free = 0
        if self._measures_memory and not self.is_pinned and self._tuner.is_searching:
            free = free_memory(self._device) >> 10
        return [load, free, *self._tuner.words(elapsed, measured)]

    def _settle(self, words):
        loads, free, *_ = zip(*words, strict=True)
        self._load = max(loads) or self._load
        self._free = min(free) << 10
        self._tuner.settle([line[2:] for line in words])

    def _order(self, key):
        """(choice, number of the step, whether it is measured)."""
        if self._pinned is not None:
            return self._pinned.choice(key) or self._not_pinned(key), -1, False
        order = self._tuner.begin(key)
        return order.choice, order.step, order.measured

    def _not_pinned(self, key) -> dict[str, Any]:
        """What layers do by themselves, said once: the file is of another model or dtype."""
        if key.kind not in self._told:
            self._told.add(key.kind)
            kinds = ", ".join(sorted(self._pinned.kinds))
            logger.warning(
                f"the file of exchange choices has none for {key.kind} (it has: {kinds}): the "
                "layers keep their own exchange"
            )
        return self._start()

    def _timer(self, number, measured, is_fixed):
        if is_fixed and not measured:
            return None
        self._last = RegionTimer(measured)
        if measured:
            self._timers[number] = self._last
        return self._last

    def _start(self) -> dict[str, Any]:
        """What the layers do by themselves."""
        values = {axis.name: getattr(self._base, axis.name) for axis in self.space.axes}
        if values.get("algorithm") == "auto":
            size = self._bytes // self._base.overlap_degree
            values["algorithm"] = self._measured.for_message(size).name
        # an algorithm that does not fit the nodes is none of the choices
        return {
            axis.name: values[axis.name] if values[axis.name] in axis.all_values else axis.values[0]
            for axis in self.space.axes
        }

    def _instead(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Where the algorithm does not serve the ranks of r, ``linear``, which would be used."""
        if self._serves.get((choice.get("algorithm"), choice.get("r", self._base.r)), True):
            return choice
        return {**choice, "algorithm": "linear"}

    def _fits(self, choice) -> bool:
        """Whether what r takes is there twice over.

        An overestimate where activations are recomputed: what is gathered is kept for one layer.
        """
        if not self._measures_memory:
            return True
        r = choice.get("r", self._base.r)
        flow = make_flow(self._layer.groups, r)  # as it was made at the start
        gathered = (
            self._num_parameters * flow.gather_size * self._itemsize if flow.gather_size > 1 else 0
        )
        copies = 2 * (flow.copies - 1) * self._bytes  # of rows, there and back
        return 2 * self._num_layers * (gathered + copies) <= self._free


def _pinned(text, space, signature):
    refuse_differences("the file of exchange choices", gather_texts(_checksum(text)))
    pinned = Pinned(text, space)
    for name in ("ranks", "ranks_per_node"):
        if pinned.signature.get(name) != signature[name]:
            raise ValueError(
                f"it was made with {name} = {pinned.signature.get(name)}, and this run has "
                f"{signature[name]}"
            )
    return pinned


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_tuning(event: Event) -> str:
    """One line for a log."""
    choice = " ".join(f"{name}={value}" for name, value in event.choice.items())
    low = WINDOW * event.key.bucket
    where = f"exchange[{event.key.kind}, capacity {low}-{low + WINDOW - 1}]"
    if event.what == "decision":
        gain = f"{event.time / 1000:.2f} ms vs {event.baseline / 1000:.2f} ms at first"
        return f"{where}: {choice}, {gain}, {event.trials} trials"
    if event.what == "drift":
        moved = f"{event.baseline / 1000:.2f} ms are now {event.time / 1000:.2f} ms"
        return f"{where}: {choice}: {moved}, tuned again"
    return f"{where}: {choice}: {event.what}"
