"""From a name to an exchange with its process groups."""

from __future__ import annotations

import dataclasses
import json
import logging

from ...config import EXCHANGES, ExchangeConfig
from ..agreement import labelled_fields
from ..flows import make_flow, possible_r
from ..gather import gather_texts, refuse_differences
from ..groups import ExpertParallelGroups, create_group
from ..nodes import ranks_per_node as find_ranks_per_node
from ..world import once_per_world
from .base import Exchange
from .linear import LinearExchange
from .local import LocalCopy, NoExchange

logger = logging.getLogger(__name__)


def build_exchange(config: ExchangeConfig | str, groups: ExpertParallelGroups) -> Exchange:
    """Make the exchange of a placement of experts.

    A collective call of all ranks where ``groups`` agrees. All layers of one placement share one
    exchange.

    Args:
        config: the choice, or the name of a registered exchange. Where that does not fit the
            nodes, the linear one is taken, with one log line.
        groups: the placement. One rank gets an exchange that moves nothing, a simulation one that
            copies.

    Returns:
        that of the flow ``config.r`` (:mod:`..flows`), whose ``groups`` are the flow's.

    Raises:
        ValueError: unknown name, an r that does not fit the placement, ranks that chose
            differently, or nodes that the ranks do not fill.
    """
    config = ExchangeConfig.of(config)
    if groups.agrees:
        _compare_with_other_ranks(config)
    return _exchange_of_flow(config, groups)


def build_flows(config: ExchangeConfig | str, groups: ExpertParallelGroups) -> dict[int, Exchange]:
    """:func:`build_exchange` for the config with every possible r. Collective in the same way."""
    config = ExchangeConfig.of(config)
    make_flow(groups, config.r)  # refuses an impossible one
    if groups.agrees:
        _compare_with_other_ranks(config)
    configs = [dataclasses.replace(config, r=r) for r in possible_r(groups)]
    return {each.r: _exchange_of_flow(each, groups) for each in configs}


def _exchange_of_flow(config: ExchangeConfig, groups: ExpertParallelGroups) -> Exchange:
    groups = make_flow(groups, config.r).exchange_groups
    cls, given = EXCHANGES.get(config.algorithm), config.ranks_per_node
    if groups.ep_size == 1:
        return NoExchange(groups)
    if groups.simulated:
        return LocalCopy(cls(groups, ranks_per_node=given))
    if not cls.needs_nodes:
        return once_per_world((cls, groups), lambda: _build(cls, groups, 0))
    if given and groups.world_size % given:
        raise ValueError(
            f"ranks_per_node={given}: {groups.world_size} ranks do not fill such nodes"
        )
    local = given or find_ranks_per_node()
    return once_per_world((cls, groups, local), lambda: _build(cls, groups, local))


def _compare_with_other_ranks(config: ExchangeConfig) -> None:
    """Refuse the first field that differs; one message per rank."""
    mine = labelled_fields(config)
    by_rank = [json.loads(text) for text in gather_texts(json.dumps([v for _, v in mine]))]
    for (label, _), values in zip(mine, zip(*by_rank, strict=True), strict=True):
        refuse_differences(label, values)


def _build(cls: type[Exchange], groups: ExpertParallelGroups, ranks_per_node: int) -> Exchange:
    reason = cls.unfit(groups.ep_size, ranks_per_node)
    if reason:
        if groups.rank == 0:
            logger.info("exchange %s: %s; using linear", cls.name, reason)
        return LinearExchange(groups)
    partitions = cls.partitions(groups.ep_size, ranks_per_node)
    subgroups = {
        key: create_group([[block[i] for i in part] for block in groups.blocks for part in parts])
        for key, parts in partitions.items()
    }
    return cls(groups, subgroups, ranks_per_node).prepare()
