"""From a name to an exchange with its process groups."""

from __future__ import annotations

from ..gather import gather_texts, refuse_differences
from ..groups import ExpertParallelGroups, create_group
from .base import Exchange
from .local import LocalCopy, NoExchange
from .registry import exchange_class


def build_exchange(name: str, groups: ExpertParallelGroups, *, ranks_per_node: int = 0) -> Exchange:
    """Make the exchange of a placement of experts.

    A collective call of all ranks where ``groups`` communicates. Process groups are made once and
    shared by all layers.

    Args:
        name: of a registered exchange.
        groups: the placement. One rank gets an exchange that moves nothing, a simulation one that
            copies.
        ranks_per_node: m; 0: as the machines of the ranks have it.

    Raises:
        ValueError: unknown name, or ranks that chose differently.
    """
    cls = exchange_class(name)
    if groups.ep_size == 1:
        return NoExchange(groups)
    if groups.simulated:
        return LocalCopy(cls(groups, ranks_per_node=ranks_per_node))
    refuse_differences("the exchange", gather_texts(name))
    partitions = cls.partitions(groups.ep_size, ranks_per_node)
    subgroups = {
        key: create_group([[block[i] for i in part] for block in groups.blocks for part in parts])
        for key, parts in partitions.items()
    }
    return cls(groups, subgroups, ranks_per_node)
