"""Construction of an exchange algorithm and its process groups from a name."""

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
    """Build the exchange for a placement of experts and ``config.r``, without a wire format.

    >>> from fairseq_tutel.distributed import build_groups
    >>> build_exchange("linear", build_groups(8, simulate_world_size=4)).name
    'linear'

    Args:
        config (ExchangeConfig or str): the options, or the name of a registered exchange.
        groups (ExpertParallelGroups): placement of the experts.

    Raises:
        ValueError: as :func:`build_algorithms`.
    """
    config = ExchangeConfig.of(config)
    return Exchange(build_algorithms(config, groups)[config.r])


def build_algorithms(
    config: ExchangeConfig | str, groups: ExpertParallelGroups
) -> dict[int, ExchangeAlgorithm]:
    """Build the algorithm for a placement of experts, once for each possible r.

    All layers with this placement share the result. Collective if ``groups.needs_sync``.
    Simulations get :class:`LocalCopy`. If the nodes do not fit the algorithm, ``linear`` replaces
    it and the log says why. Raise ValueError if the name is unknown, r does not fit the placement,
    ranks chose differently, or ranks do not fill the nodes.
    """
    config = ExchangeConfig.of(config)
    expert_parallelism(groups, config.r)  # raises if r is impossible
    if groups.needs_sync:
        compare_settings(flat_settings(config))
    configs = [dataclasses.replace(config, r=r) for r in possible_r(groups)]
    return {each.r: _algorithm(each, groups) for each in configs}


def _algorithm(config: ExchangeConfig, groups: ExpertParallelGroups) -> ExchangeAlgorithm:
    groups = expert_parallelism(groups, config.r).exchange_groups
    cls, given = EXCHANGES.get(config.algorithm), config.ranks_per_node
    if groups.ep_size == 1:
        return LinearExchange(groups)  # sends nothing
    if groups.simulated:
        return LocalCopy(groups, cls.name)
    per_node = 0
    if cls.needs_nodes:
        if given and groups.world_size % given:
            raise ValueError(
                f"ranks_per_node={given}: {groups.world_size} ranks do not fill such nodes"
            )
        per_node = given or find_ranks_per_node()
    return once_per_world((cls, groups, per_node), lambda: _build(cls, groups, per_node))


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
