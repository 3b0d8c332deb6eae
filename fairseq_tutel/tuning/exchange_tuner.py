"""Find the fastest exchange while training: try and measure in the steps themselves.

The agreement of a step is one small all-gather. It also carries the ranks' measurements, so that
every rank runs the same state machine (:mod:`fairseq_tutel.tuning.search`) on the same integers.
Evaluation uses the layers' own exchange, because its losses must not depend on times. ``README.md``
of ``distributed`` has an example.
"""

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..distributed import StepAgreement, gather_texts, refuse_differences, sync_stacks_of_all
from ..moe import MoELayer
from .candidates import build_choices, check_layers_match, signature
from .search.halving import Choice
from .search.store import dump, load, read_pinned
from .search.tuner import WINDOW, Key, Tuner, nearest
from .timer import RegionTimer

logger = logging.getLogger(__name__)


class ExchangeTuner:
    """Chooser of the exchange for every training step of matching layers.

    Construction and every :meth:`agree` are collective: all ranks make equally many forward passes.

    Args:
        layers: layers with one width, number of experts and exchange; they are measured together.
        tuned: fields of :class:`~fairseq_tutel.config.ExchangeConfig` to choose, from ``TUNABLE``
            (default: algorithm and overlap degree).
        steps: steps of a trial in round two (default 5); the first is not measured. Round one
            measures one step, and each later round twice as many as the one before.
        max_loss: share of the run's time after which no further trial starts (default 0.02).
        pinned: text of :meth:`file`. The tuner uses its choices and measures nothing, so rounding
            does not depend on times (default None: measure).

    Raises:
        ValueError: the layers differ, a field is unknown, or the file does not fit.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        tuned: Sequence[str] = ("algorithm", "overlap_degree"),
        *,
        steps: int = 5,
        max_loss: float = 0.02,
        pinned: str | None = None,
    ):
        self._layer = layer = check_layers_match(layers)
        self._base = layer.exchange_config
        self.choices = build_choices(layers, tuned, everything=pinned is not None)
        self.signature = signature(layer)
        own = {name: getattr(self._base, name) for name in self.choices[0]}
        self._tuner = Tuner(self.choices, steps=steps, max_loss=max_loss, start=own)
        self._others: list[dict] = []  # results of other machines
        self._pinned: dict[Key, Choice] | None = None
        if pinned is not None:
            checksum = hashlib.sha256(pinned.encode()).hexdigest()[:16]
            refuse_differences("the file of exchange choices", gather_texts(checksum))
            same = {name: self.signature[name] for name in ("ranks", "ranks_per_node")}
            self._pinned = read_pinned(pinned, self.choices, same)
        self._warned: set[str] = set()  # kinds of keys that are missing in the file
        # cached, so that a step without trial or measurement costs nothing
        self._exchange = functools.cache(
            lambda *choice: dataclasses.replace(self._base, **dict(choice))
        )
        self._num_parameters = sum(param.numel() for param in layer.experts.parameters())
        self._timers: dict[int, RegionTimer] = {}
        self._began: int | None = None

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def agree(self, num_tokens: int, dtype: torch.dtype, **options: Any) -> StepAgreement:
        """Agree on one forward pass, including the exchange that its layers use.

        ``num_tokens`` is this rank's; other arguments are those of :meth:`agree_stacks`.
        """
        return self.agree_stacks([num_tokens], dtype, **options)[0]

    def agree_stacks(
        self,
        counts: Sequence[int],
        dtype: torch.dtype,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
    ) -> list[StepAgreement]:
        """Agree on a pass through several stacks of the layers, such as an encoder and a decoder.

        All stacks use one exchange, chosen for the largest number of tokens. ``counts`` are this
        rank's tokens for each stack, ``dtype`` is that of the experts' rows; other arguments are
        those of the layers' calls. Return an agreement for each stack.
        """
        layer = self._layer
        settings = layer.step_settings(dtype, top_k=top_k, capacity_factor=capacity_factor)
        each = [settings] * len(counts)
        if not layer.groups.needs_sync:
            return list(map(StepAgreement, counts, each))
        steps, table = sync_stacks_of_all(counts, each, layer.groups, self._payload())
        self._tuner.record([line[len(counts) :] for line in table])
        if not layer.training:
            self._began = None  # evaluation does not count as time of the run
            return steps
        # all ranks use one choice, also ranks that do not exchange tokens with this one
        largest = max(count for line in table for count in line[: len(counts)])
        config = settings.routing
        sizes = f"M{layer.model_dim} E{layer.groups.num_experts} K{config.top_k}"
        kind = f"train/{str(dtype).removeprefix('torch.')}/{sizes} P{self._num_parameters}"
        capacity = config.top_k * largest // config.num_experts  # the mean if it is not fixed
        if config.is_static(training=True) and not self._base.wire_compact:
            capacity = config.capacity(largest, training=True)
        number, choice, measured = self._choose(Key(kind, capacity // WINDOW))
        timer = None
        if measured:
            timer = self._timers[number] = RegionTimer()
        exchange = self._exchange(*choice.items())
        settings = dataclasses.replace(settings, exchange=exchange)
        changed = {"settings": settings, "exchange": exchange, "timer": timer}
        return [dataclasses.replace(step, **changed) for step in steps]

    def take_events(self) -> list[dict[str, Any]]:
        """Return trials and decisions since the last call; the same on all ranks."""
        events, self._tuner.events = self._tuner.events, []
        return events

    @property
    def milliseconds(self) -> float | None:
        """Time of all layers in the last measured step, on the fastest rank."""
        last = self._tuner.last_sample
        return None if last is None else last / 1000

    def file(self) -> str:
        """Return JSON text with all results, for ``pinned``."""
        return dump(self._tuner, self.signature, self._others)

    def state(self) -> dict[str, Any]:
        return {"file": self.file()}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, the same one on all ranks; raise ValueError if it is invalid."""
        if state is not None and not self.is_pinned:
            self._others = load(state["file"], self._tuner, self.signature)

    def _payload(self) -> list[int]:
        now = time.perf_counter_ns()
        elapsed = 0 if self._began is None else (now - self._began) // 1000
        self._began = now
        self._timers = {n: self._timers[n] for n in self._tuner.awaited if n in self._timers}
        known = {number: timer.microseconds for number, timer in self._timers.items()}
        measured = {number: us for number, us in known.items() if us is not None}
        return self._tuner.payload(elapsed, measured)

    def _choose(self, key: Key) -> tuple[int, Choice, bool]:
        """Return step, choice and whether a sample is wanted."""
        if self._pinned is None:
            return self._tuner.begin(key)
        found = nearest(self._pinned, key)
        if found is None and key.kind not in self._warned:
            self._warned.add(key.kind)
            kinds = "; ".join(sorted({_describe_kind(other.kind) for other in self._pinned}))
            logger.warning(
                f"the file of exchange choices has none for {_describe_kind(key.kind)} (it has: "
                f"{kinds}): the layers keep their own exchange"
            )
        return -1, {} if found is None else self._pinned[found], False


def describe_tuning(event: Mapping[str, Any]) -> str:
    """Describe a decision in one line for a log."""
    choice = " ".join(f"{name}={value}" for name, value in event["choice"].items())
    now, before = (f"{event[name] / 1000:.2f} ms" for name in ("us", "baseline_us"))
    return (
        f"exchange for {describe_key(event['key'])}: {choice}, {now} vs {before} at first, "
        f"{event['trials']} trials"
    )


def describe_key(text: str) -> str:
    """Describe the ``key`` of an event in words."""
    kind, bucket = Key.parse(text)
    return f"{_describe_kind(kind)}, capacity {WINDOW * bucket} to {WINDOW * (bucket + 1) - 1}"


def _describe_kind(kind: str) -> str:
    """``train/float32/M8 E4 K2`` -> "float32, model dim 8, 4 experts, top-2"."""
    sizes = {
        "M": "model dim {}",
        "E": "{} experts",
        "K": "top-{}",
        "P": "{} expert parameters per layer and rank",
    }
    *_, dtype, words = kind.split("/")
    named = [sizes.get(word[0], word).format(word[1:]) for word in words.split()]
    return ", ".join([dtype, *named])
