"""From a name to an exchange with its process groups."""

from __future__ import annotations

import logging

from ...config import EXCHANGES
from ..gather import gather_integers, gather_texts, refuse_differences
from ..groups import ExpertParallelGroups, create_group
from ..nodes import ranks_per_node as find_ranks_per_node
from ..world import once_per_world
from .base import Exchange
from .linear import LinearExchange
from .local import LocalCopy, NoExchange

logger = logging.getLogger(__name__)


def build_exchange(name: str, groups: ExpertParallelGroups, *, ranks_per_node: int = 0) -> Exchange:
    """Make the exchange of a placement of experts.

    A collective call of all ranks where ``groups`` communicates. All layers of one placement share
    one exchange.

    Args:
        name: of a registered exchange. Where it does not fit the nodes, the linear one is taken,
            with one log line.
        groups: the placement. One rank gets an exchange that moves nothing, a simulation one that
            copies.
        ranks_per_node: m; 0: as the machines of the ranks have it.

    Raises:
        ValueError: unknown name, ranks that chose differently, or nodes that the ranks do not fill.
    """
    cls = EXCHANGES.get(name)
    if groups.ep_size == 1:
        return NoExchange(groups)
    if groups.simulated:
        return LocalCopy(cls(groups, ranks_per_node=ranks_per_node))
    refuse_differences("the exchange", gather_texts(name))
    if not cls.needs_nodes:
        return once_per_world((cls, groups), lambda: _build(cls, groups, 0))
    given = [each for (each,) in gather_integers([ranks_per_node])]
    refuse_differences("the ranks per node", given)
    if ranks_per_node < 0 or ranks_per_node and groups.world_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node}: {groups.world_size} ranks do not fill such nodes"
        )
    local = ranks_per_node or find_ranks_per_node()
    return once_per_world((cls, groups, local), lambda: _build(cls, groups, local))


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
