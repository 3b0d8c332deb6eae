"""One call of a layer: its options, resolved into one frozen value before anything is computed.

A call chooses among exchanges whose process groups were built before training; the degree of
overlap, the formats on the wire and the like are free in every call.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..config import ExchangeConfig, MoEConfig
from ..distributed import (
    Exchange,
    ExchangeAlgorithm,
    ExpertParallelGroups,
    ExpertParallelism,
    StepAgreement,
    StepSettings,
    expert_parallelism,
)
from ..distributed.exchanges import LocalCopy, build_algorithms
from .experts import ExpertBank
from .routing import RouterCall
from .wire import WireCodec


class ExchangeChoice(NamedTuple):
    """How rows travel in a call of a layer; the parallelism is that of ``config.r``."""

    config: ExchangeConfig
    exchange: Exchange
    parallelism: ExpertParallelism

    def refuse_own_experts(self, experts: ExpertBank) -> None:
        """Refuse modules of the user's own where experts are cut or gathered, by ValueError."""
        way = self.parallelism
        if way.is_replicated or experts.can_be_gathered:
            return
        if way.r != 1 or way.groups.num_slices > 1:
            name = type(next(experts.children(), experts)).__name__
            raise ValueError(
                f"r={way.r}, placement={way.groups.placement!r}: the weights of modules of one's "
                f"own ({name}) cannot be gathered; they are computed whole, with r=1"
            )


class ExchangeChoices:
    """What was built. Timed exchanges are never in chunks: their times would be the experts';
    with ``skip`` they are copies.
    """

    def __init__(self, groups: ExpertParallelGroups, *, timed: bool, skip: bool):
        self._groups, self._timed, self._skip = groups, timed, skip
        self._algorithms: dict[tuple, ExchangeAlgorithm] = {}
        self._choices: dict[ExchangeConfig, ExchangeChoice] = {}

    def prepare(self, exchange: ExchangeConfig | str) -> ExchangeChoice:
        """Build what a choice needs, with every r that is possible. Collective, in one order."""
        config = ExchangeConfig.of(exchange)
        # also compares the ranks' configs
        for r, built in build_algorithms(config, self._groups).items():
            if self._skip and built.groups.ep_size > 1:
                built = LocalCopy(built.groups, built.name)
            self._algorithms.setdefault((config.algorithm, config.ranks_per_node, r), built)
        return self.of(config)

    def of(self, config: ExchangeConfig) -> ExchangeChoice:
        """A choice whose parts are there, else ValueError: to build them here would hang where
        one rank chose alone.
        """
        if config not in self._choices:
            self._choices[config] = self._choose(config)
        return self._choices[config]

    def _choose(self, config):
        # refuses an r that is not possible; all that are were made with the algorithms
        parallelism = expert_parallelism(self._groups, config.r)
        built = self._algorithms.get((config.algorithm, config.ranks_per_node, config.r))
        if built is None:
            raise ValueError(
                f"exchange={config} was not built for this layer: call "
                "layer.prepare_exchanges(...) with it on all ranks before training"
            )
        if self._timed:
            config = dataclasses.replace(config, overlap_degree=1)
        compresses = config.compresses and built.groups.ep_size > 1
        exchange = Exchange(built, WireCodec(config) if compresses else None, self._timed)
        return ExchangeChoice(config, exchange, parallelism)


@dataclass(frozen=True)
class LayerCall:
    """What holds for a call of a layer, on all ranks."""

    config: MoEConfig
    choice: ExchangeChoice
    training: bool
    model_dim: int
    is_usual: bool  # whether these are the layer's own options, or its step's

    def settings(self, dtype: torch.dtype) -> StepSettings:
        """What ranks must have in common; the dtype is that of the experts' rows."""
        config = self.config
        return StepSettings(
            num_experts=config.num_experts,
            null_experts=config.null_experts,
            top_k=config.top_k,
            model_dim=self.model_dim,
            mode="training" if self.training else "evaluation",
            capacity_factor=config.capacity_factor,
            eval_capacity_factor=config.eval_capacity_factor,
            eval_capacity_token_fraction=config.eval_capacity_token_fraction,
            exchange=self.choice.config,
            dtype=dtype,
            local_drop=config.local_drop,
        )

    def check(self, step: StepAgreement) -> None:
        """Raise ValueError for options that the ranks did not compare: sizes would not fit.

        An agreement may be older than the autocast that decides the dtype; all else must hold.
        """
        if self.is_usual or step.settings is None:
            return
        wanted = self.settings(step.settings.dtype)
        for label, (value, agreed) in wanted.differences(step.settings).items():
            raise ValueError(
                f"this call's options make {label} {value}, but the ranks' agreement for this "
                f"step has {agreed}; give the same options to step_settings()"
            )

    def for_router(self, num_tokens: int, num_sequences: int, **reports: bool) -> RouterCall:
        """Return the router's part of the call; ``reports`` are fields of :class:`RouterCall`."""
        compact = self.choice.config.wire_compact and self.communicates
        return RouterCall(self.config, self.training, num_tokens, num_sequences, compact, **reports)

    @property
    def overlap_degree(self) -> int:
        """Chunks in which rows travel; 1 where there is nothing to overlap with."""
        return self.choice.config.overlap_degree if self.communicates else 1

    @property
    def communicates(self) -> bool:
        """Whether there are other ranks to send rows to."""
        return self.choice.exchange.groups.ep_size > 1
