"""Plain all-to-all: one collective in which every rank sends a message to every other rank."""

import math

import torch.distributed as dist

from .algorithm import ExchangeAlgorithm, register_exchange


@register_exchange("linear")
class LinearExchange(ExchangeAlgorithm):
    """One collective among all ranks.

    ``all_to_all_single`` of torch.distributed: P - 1 messages per rank.
    """

    def move(self, rows, received, direction, splits):
        to_P, from_P = (None, None) if splits is None else splits.sizes(direction.outward)
        dist.all_to_all_single(received, rows, from_P, to_P, group=self.groups.ep_group)

    @classmethod
    def predict(cls, num_bytes, num_ranks, network):
        if num_ranks == 1:
            return 0.0
        # time of the slower network, plus a cost per message
        near = min(num_ranks, network.gpus_per_node)
        part = num_bytes / num_ranks
        inside = part * (near - 1) / (network.node_bandwidth or math.inf)
        outside = part * (num_ranks - near) / (network.network_bandwidth or math.inf)
        carried = max(inside, outside) / network.link_efficiency
        return network.latency + carried + (num_ranks - 1) * network.message_overhead
