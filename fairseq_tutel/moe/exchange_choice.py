"""Exchanges that a layer can use: build them before training, choose one in each call.

Process groups are built before training. The degree of overlap, the wire formats and r are free in
every call.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

from .. import distributed
from ..config import ExchangeConfig, MoEConfig
from ..distributed.exchanges import LocalCopy, build_algorithms
from .experts import ExpertBank
from .routing import RouterCall
from .wire import WireCodec


class ExchangeChoice(NamedTuple):
    """How rows travel in one call of a layer."""

    config: ExchangeConfig
    exchange: distributed.Exchange
    parallelism: distributed.ExpertParallelism  # the placement for ``config.r``
    overlap_degree: int  # chunks in which rows travel; 1 if there is nothing to overlap with

    def __deepcopy__(self, memo):
        return self  # with its process groups

    @property
    def communicates(self) -> bool:
        """Whether there are other ranks to send rows to."""
        return self.exchange.groups.ep_size > 1

    @property
    def balances(self) -> bool:
        """Whether ranks help each other; never if rows stay on their rank (:class:`LocalCopy`)."""
        stays = isinstance(self.exchange.algorithm, LocalCopy)
        return self.config.balance_ranks and self.communicates and not stays

    def refuse_capacity(self, config: MoEConfig) -> None:
        """Raise ValueError for ``balance_ranks`` if a fixed capacity makes loads equal."""
        if self.config.balance_ranks and config.is_static(training=True):
            raise ValueError(
                "balance_ranks=True (--moe-balance-ranks) needs capacity_factor=0 "
                f"(--moe-capacity-factor), not capacity_factor={config.capacity_factor}"
            )

    def refuse_own_experts(self, experts: ExpertBank) -> None:
        """Raise ValueError if this choice cuts, gathers or moves experts that do not allow it."""
        way = self.parallelism
        if self.config.balance_ranks and not (way.is_replicated and experts.can_be_gathered):
            raise ValueError(
                "balance_ranks=True moves whole experts of a built-in or registered network: it "
                f"needs r=1, placement='replicated' and expert_storage='stacked', not r={way.r}, "
                f"placement={way.groups.placement!r} and {type(experts).__name__}"
            )
        if way.is_replicated or experts.can_be_gathered:
            return
        if way.r != 1 or way.groups.num_slices > 1:
            name = type(next(experts.children(), experts)).__name__
            raise ValueError(
                f"r={way.r}, placement={way.groups.placement!r}: the weights of modules of one's "
                f"own ({name}) cannot be gathered; they are computed whole, with r=1"
            )

    def with_local_drop(
        self, call: RouterCall, draw: int | None, layer_index: int
    ) -> ExchangeChoice:
        """Return the choice for one step: with local drop, rows may stay on their rank.

        Local drop is NLLB's ``--moe-local-drop`` (gating dropout, arXiv 2205.14336): in a training
        step a layer exchanges nothing, with a probability. Rank p, with e local experts, then
        computes rows for expert ``q * e + j`` by its own expert ``p * e + j``. ``draw`` is the
        random number that the ranks agreed on, so that all ranks and a recomputation decide alike;
        None in evaluation.
        """
        probability = call.config.local_drop if call.training else 0.0
        if probability == 0 or draw is None or not self.communicates:
            return self
        # a string seed is hashed, so that neighbouring layers draw independently
        if random.Random(f"{draw} {layer_index}").random() >= probability:
            return self
        copy = LocalCopy(self.exchange.groups, self.exchange.name)
        return self._replace(exchange=distributed.Exchange(copy, None, False), overlap_degree=1)


class ExchangeChoices:
    """Cache of a layer's exchanges, by their options.

    ``timed`` exchanges are measured and not chunked, because overlap would hide their cost.
    ``skip`` copies rows instead of sending them, for benchmarks.
    """

    def __init__(self, groups: distributed.ExpertParallelGroups, *, timed: bool, skip: bool):
        self._groups, self._timed, self._skip = groups, timed, skip
        self._algorithms: dict[tuple, distributed.ExchangeAlgorithm] = {}
        self._choices: dict[ExchangeConfig, ExchangeChoice] = {}

    def __deepcopy__(self, memo):
        return self  # copies of a layer share its process groups

    def prepare(self, exchange: ExchangeConfig | str) -> ExchangeChoice:
        """Build an exchange for every possible r. Collective; ranks give the same exchange."""
        config = ExchangeConfig.of(exchange)
        for r, built in build_algorithms(config, self._groups).items():  # compares ranks' configs
            if self._skip and built.groups.ep_size > 1:
                built = LocalCopy(built.groups, built.name)
            self._algorithms.setdefault((config.algorithm, config.ranks_per_node, r), built)
        return self.of(config)

    def of(self, config: ExchangeConfig) -> ExchangeChoice:
        """Return the choice for these options; raise ValueError if it was not prepared.

        Building it here would hang if only this rank chose it.
        """
        if config in self._choices:
            return self._choices[config]
        # raises if r is impossible
        parallelism = distributed.expert_parallelism(self._groups, config.r)
        built = self._algorithms.get((config.algorithm, config.ranks_per_node, config.r))
        if built is None:
            raise ValueError(
                f"exchange={config} was not built for this layer: call "
                "layer.prepare_exchanges(...) with it on all ranks before training"
            )
        used = dataclasses.replace(config, overlap_degree=1) if self._timed else config
        communicates = built.groups.ep_size > 1
        codec = WireCodec(used) if used.compresses and communicates else None
        degree = used.overlap_degree if communicates else 1
        helps = used.balance_ranks and communicates
        exchange = distributed.Exchange(built, codec, self._timed, helps)
        self._choices[config] = ExchangeChoice(used, exchange, parallelism, degree)
        return self._choices[config]

    def for_call(
        self, own: ExchangeChoice, exchange: ExchangeConfig | str | None, r: int | None
    ) -> ExchangeChoice:
        """Return the choice for one call: ``own`` unless the call gives an exchange or r."""
        wanted = ExchangeConfig.of(exchange or own.config)
        if r is not None and r != wanted.r:
            wanted = dataclasses.replace(wanted, r=r)
        return own if wanted == own.config else self.of(wanted)
