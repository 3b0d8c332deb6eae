"""The plain all-to-all: one collective in which every rank sends a message to every other."""

from __future__ import annotations

import math

import torch.distributed as dist

from .base import Exchange
from .registry import register_exchange


@register_exchange("linear")
class LinearExchange(Exchange):
    """One collective among all ranks.

    ``all_to_all_single`` of torch.distributed: W - 1 messages per rank.
    """

    def move(self, rows, received, leg, parts):
        """One collective."""
        to, by = (None, None) if parts is None else parts.splits(leg.outward)
        dist.all_to_all_single(received, rows, by, to, group=self.groups.ep_group)

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        """The slower of the two networks, and a cost per message."""
        if num_ranks == 1:
            return 0.0
        near = min(num_ranks, links.gpus_per_node)
        part = num_bytes / num_ranks
        inside = part * (near - 1) / (links.node_bandwidth or math.inf)
        outside = part * (num_ranks - near) / (links.network_bandwidth or math.inf)
        carried = max(inside, outside) / links.link_efficiency
        return links.latency + carried + (num_ranks - 1) * links.message_overhead
