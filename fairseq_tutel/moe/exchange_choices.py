"""The exchanges among which the calls of a layer choose, built before training."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import nn

from ..config import ExchangeConfig
from ..distributed import (
    Exchange,
    ExpertParallelGroups,
    Flow,
    LocalCopy,
    build_flows,
    make_flow,
)
from .wire import WireErrors, with_wire


class ExchangeChoice(NamedTuple):
    """How rows travel in a call of a layer.

    Attributes:
        flow: that of ``config.r``.
    """

    config: ExchangeConfig
    exchange: Exchange
    flow: Flow


class ExchangeChoices:
    """What was built, by what takes building: process groups, measurements.

    Everything else of an :class:`ExchangeConfig`, such as the degree of overlap and the formats on
    the wire, is free in every call.

    Args:
        groups: placement of the experts.
        one_at_a_time: never in chunks, as exchanges are timed.
        skip: copies in place of exchanges.
    """

    def __init__(self, groups: ExpertParallelGroups, *, one_at_a_time: bool, skip: bool):
        self._groups, self._one_at_a_time, self._skip = groups, one_at_a_time, skip
        self._built: dict[tuple, Exchange] = {}
        self._flows: dict[int, Flow] = {}
        self._errors = WireErrors()

    def prepare(self, exchange: ExchangeConfig | str) -> ExchangeChoice:
        """Build what a choice needs, and the same with every other r that is possible.

        Collective; all ranks prepare the same, in one order.
        """
        config = ExchangeConfig.of(exchange)
        # also compares the ranks' configs
        for r, built in build_flows(config, self._groups).items():
            self._flows[r] = make_flow(self._groups, r)
            if self._skip and built.communicates:
                built = LocalCopy(built)
            self._built.setdefault(_what_is_built(dataclasses.replace(config, r=r)), built)
        return self.of(config)

    def of(self, exchange: ExchangeConfig | str) -> ExchangeChoice:
        """A choice whose parts are there; communicates nothing.

        Raises:
            ValueError: they are not. To build them here would hang where one rank chose alone.
        """
        config = ExchangeConfig.of(exchange)
        built = self._built.get(_what_is_built(config))
        if config.r not in self._flows:
            make_flow(self._groups, config.r)  # all that are possible are there: refuses it
        if built is None:
            raise ValueError(
                f"exchange={config} was not built for this layer: call "
                "layer.prepare_exchanges(...) with it on all ranks before training"
            )
        if self._one_at_a_time:
            config = dataclasses.replace(config, overlap_degree=1)
        return ExchangeChoice(config, with_wire(built, config, self._errors), self._flows[config.r])


def refuse_own_experts(experts: nn.Module, flow: Flow) -> None:
    """Refuse modules of the user's own where experts are cut or gathered.

    Raises:
        ValueError: see above.
    """
    if flow.is_plain or hasattr(experts, "network"):
        return
    if flow.r != 1 or flow.groups.num_slices > 1:
        raise ValueError(
            f"r={flow.r}, placement={flow.groups.placement!r}: the weights of modules of one's own "
            f"({type(next(experts.children(), experts)).__name__}) cannot be gathered; they are "
            "computed whole, with r=1"
        )


def _what_is_built(config: ExchangeConfig) -> tuple:
    return config.algorithm, config.ranks_per_node, config.r
