"""From a name to an algorithm with its process groups."""

from __future__ import annotations

import dataclasses
import logging

from ...config import EXCHANGES, ExchangeConfig
from ..agreement import flat_settings
from ..placement.expert_parallelism import expert_parallelism, possible_r
from ..placement.groups import ExpertParallelGroups, create_group
from ..world import compare_settings, once_per_world
from ..world import ranks_per_node as find_ranks_per_node
from .algorithm import ExchangeAlgorithm, LocalCopy
from .exchange import Exchange
from .linear import LinearExchange

logger = logging.getLogger(__name__)


def build_exchange(config: ExchangeConfig | str, groups: ExpertParallelGroups) -> Exchange:
    """Make the exchange of a placement of experts for ``config.r``, without wire formats."""
    config = ExchangeConfig.of(config)
    return Exchange(build_algorithms(config, groups)[config.r])


def build_algorithms(
    config: ExchangeConfig | str, groups: ExpertParallelGroups
) -> dict[int, ExchangeAlgorithm]:
    """Make the algorithms of a placement of experts, which its layers share, by each possible r.

    Collective where ``groups.needs_sync``. A simulation gets an algorithm that copies. Where the
    chosen one (``config``, or the name of a registered exchange) does not fit the nodes, the linear
    one is taken, with one log line. Raises ValueError for an unknown name, an r that does not fit
    the placement, ranks that chose differently, and nodes that the ranks do not fill.
    """
    config = ExchangeConfig.of(config)
    expert_parallelism(groups, config.r)  # refuses an impossible one
    if groups.needs_sync:
        compare_settings(flat_settings(config))
    configs = [dataclasses.replace(config, r=r) for r in possible_r(groups)]
    return {each.r: _algorithm(each, groups) for each in configs}


def _algorithm(config: ExchangeConfig, groups: ExpertParallelGroups) -> ExchangeAlgorithm:
    groups = expert_parallelism(groups, config.r).exchange_groups
    cls, given = EXCHANGES.get(config.algorithm), config.ranks_per_node
    if groups.ep_size == 1:
        return LinearExchange(groups)  # with nobody
    if groups.simulated:
        return LocalCopy(groups, cls.name)
    local = 0
    if cls.needs_nodes:
        if given and groups.world_size % given:
            raise ValueError(
                f"ranks_per_node={given}: {groups.world_size} ranks do not fill such nodes"
            )
        local = given or find_ranks_per_node()
    return once_per_world((cls, groups, local), lambda: _build(cls, groups, local))


def _build(cls, groups, ranks_per_node) -> ExchangeAlgorithm:
    reason = cls.unsupported_reason(groups.ep_size, ranks_per_node)
    if reason:
        if groups.rank == 0:
            logger.info("exchange %s: %s; using linear", cls.name, reason)
        return LinearExchange(groups)
    subgroups = {
        key: create_group([[block[i] for i in part] for block in groups.blocks for part in parts])
        for key, parts in cls.partitions(groups.ep_size, ranks_per_node).items()
    }
    return cls(groups, subgroups, ranks_per_node)
