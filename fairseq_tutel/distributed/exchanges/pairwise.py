"""All-to-all as rounds of point-to-point messages: each rank with one other at a time."""

from __future__ import annotations

import math

import torch.distributed as dist

from .base import Exchange
from .registry import register_exchange


@register_exchange("pairwise")
class PairwiseExchange(Exchange):
    """Rounds of messages between pairs of ranks.

    W - 1 of them; in round i a rank sends to the i-th after it, receives from the i-th before.

    No two messages of a round have the same receiver, so that none waits at a busy port (Thakur,
    Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
    """

    def move(self, rows, received, leg, parts):
        """W - 1 rounds; a pair without rows exchanges nothing."""
        group, ranks, me = self.groups.ep_group, self.groups.ep_size, self.groups.ep_rank
        if parts is None:
            shape = (ranks, rows.shape[0] // ranks, *rows.shape[1:])
            sent, got = rows.view(shape), received.view(shape)
        else:
            to, by = parts.splits(leg.outward)
            sent, got = rows.split(to), received.split(by)
        got[me].copy_(sent[me])
        for distance in range(1, ranks):
            after, before = (me + distance) % ranks, (me - distance) % ranks
            pair = []
            if sent[after].numel():
                pair.append(_p2p(dist.isend, sent[after], after, group))
            if got[before].numel():
                pair.append(_p2p(dist.irecv, got[before], before, group))
            for work in dist.batch_isend_irecv(pair) if pair else ():
                work.wait()

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        """Rounds one after the other: the networks are not used at the same time."""
        if num_ranks == 1:
            return 0.0
        near = min(num_ranks, links.gpus_per_node)
        part = num_bytes / num_ranks / links.link_efficiency
        inside = part * (near - 1) / (links.node_bandwidth or math.inf)
        outside = part * (num_ranks - near) / (links.network_bandwidth or math.inf)
        return inside + outside + (num_ranks - 1) * (links.latency + links.message_overhead)


def _p2p(operation, rows, rank, group):
    # by its rank in the job: torch 2.5 has no other name
    peer = rank if group is None else dist.get_global_rank(group, rank)
    return dist.P2POp(operation, rows, peer, group)
