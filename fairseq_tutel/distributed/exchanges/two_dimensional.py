"""Two-dimensional hierarchical all-to-all (2DH): first inside the nodes, then between them.

Source: Tutel (Hwang et al., arXiv 2206.03382, section 4.1 and appendix A). There are N nodes of m
ranks; (a, i) is rank i of node a. It sends one message to each other rank of its node, then one to
rank i of each other node: m + N - 2 messages instead of P - 1. This is faster if the cost per
message dominates (many ranks, small parts), slower if bandwidth inside nodes does. With c rows for
each rank::

    sent        [i'][a'][c]   for rank (a', i'), in the order that dispatch writes: send_order
    intra-node  [i''][a'][c]  now on rank (a, i'): from rank (a, i'') of the node, for (a', i')
    transpose   [a'][i''][c]  the only copy
    inter-node  [a''][i''][c] on rank (a', i'): from rank (a'', i''), in rank order

``combine`` runs these steps backwards. The paper starts in rank order and transposes once more;
here ``ops.dispatch`` and ``ops.combine`` use the order of the first message.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from .algorithm import ExchangeAlgorithm, Splits, chunk_sizes, register_exchange
from .linear import LinearExchange


class _Stages(NamedTuple):
    """Splits of the two collectives of an uneven exchange, in the DISPATCH direction."""

    intra: tuple[list[int], list[int]]  # (rows to, rows from) each of the m ranks of the node
    inter: tuple[list[int], list[int]]  # the same for rank i of each of the N nodes
    order: torch.Tensor  # int64, index of each inter-node row in the intra-node message


@register_exchange("2dh")
class TwoDimensionalExchange(ExchangeAlgorithm):
    """Hierarchical, inside the nodes first: fewer and larger messages, for many nodes.

    Two collectives, of m ranks and of N, and one transposition of blocks between them.
    """

    needs_nodes = True

    @property
    def shape(self) -> tuple[int, int]:
        """(N, m): nodes, and ranks per node."""
        return self.groups.ep_size // self.ranks_per_node, self.ranks_per_node

    @property
    def send_order(self) -> list[int]:
        nodes, local = self.shape
        return [a * local + i for i in range(local) for a in range(nodes)]

    @classmethod
    def unsupported_reason(cls, num_ranks, ranks_per_node):
        if not ranks_per_node or num_ranks % ranks_per_node and ranks_per_node % num_ranks:
            return "the nodes do not hold equal numbers of neighbouring ranks"
        if ranks_per_node >= num_ranks:
            return f"the {num_ranks} ranks of an exchange are on one node"
        if ranks_per_node == 1:
            return "each node has one rank"
        return None

    @classmethod
    def partitions(cls, num_ranks, ranks_per_node):
        m = ranks_per_node
        return {
            "intra": [list(range(first, first + m)) for first in range(0, num_ranks, m)],
            "inter": [list(range(i, num_ranks, m)) for i in range(m)],
        }

    def move(self, rows, received, direction, splits):
        (nodes, local), stages = self.shape, None if splits is None else splits.stages
        if direction.outward:
            got = self._collective("intra", rows, stages, outward=True)
            rows = _transpose(got, local, nodes) if stages is None else got[stages.order]
            self._collective("inter", rows, stages, outward=True, received=received)
            return
        got = self._collective("inter", rows, stages, outward=False)
        if stages is None:
            rows = _transpose(got, nodes, local)
        else:
            rows = torch.empty_like(got).index_copy_(0, stages.order, got)
        self._collective("intra", rows, stages, outward=False, received=received)

    def _collective(self, which, rows, stages, *, outward, received=None):
        to_ranks = from_ranks = None
        if stages is not None:
            sizes = getattr(stages, which)
            to_ranks, from_ranks = sizes if outward else sizes[::-1]
        if received is None:
            size = rows.shape[0] if from_ranks is None else sum(from_ranks)
            received = rows.new_empty((size, *rows.shape[1:]))
        dist.all_to_all_single(received, rows, from_ranks, to_ranks, group=self.subgroups[which])
        return received

    def share_chunks(self, count_E, degree):
        # counts travel in the two stages of the rows, so each stage learns its own splits
        nodes, local = self.shape
        count_ANe = count_E.to(torch.int64).view(nodes, local, -1)  # by node, rank on it, expert
        sent = count_ANe.transpose(0, 1).contiguous()
        from_node = torch.empty_like(sent)
        dist.all_to_all_single(from_node, sent, group=self.subgroups["intra"])
        through = from_node.transpose(0, 1).contiguous()
        received = torch.empty_like(through)
        dist.all_to_all_single(received, through, group=self.subgroups["inter"])
        count_GPe = chunk_sizes(received, degree).view(degree, nodes * local, -1)
        sent_GAN = chunk_sizes(count_ANe, degree).sum(3)
        # [chunk, a', i'']: rows that came from (a, i'') for node a'
        between_GAN = chunk_sizes(through, degree).sum(3)
        sizes = (sent_GAN.flatten(1), count_GPe.sum(2), between_GAN.flatten(1))
        chunks = []
        for number, (sent_P, received_P, between_P) in enumerate(torch.stack(sizes, 1).tolist()):
            intra = (_sums(sent_P, nodes, local, 0), _sums(between_P, nodes, local, 0))
            inter = (_sums(between_P, nodes, local, 1), _sums(received_P, nodes, local, 1))
            order = _transposed_order(between_GAN[number], sum(between_P))
            splits = Splits(sent_P, received_P, _Stages(intra, inter, order))
            chunks.append((count_GPe[number], splits))
        return chunks

    @classmethod
    def predict(cls, num_bytes, num_ranks, network):
        local = network.gpus_per_node
        if cls.unsupported_reason(num_ranks, local):
            return LinearExchange.predict(num_bytes, num_ranks, network)
        nodes = num_ranks // local
        inside = num_bytes * (local - 1) / local / (network.node_bandwidth or math.inf)
        outside = num_bytes * (nodes - 1) / nodes / (network.network_bandwidth or math.inf)
        copy = 2 * num_bytes / (network.memory_bandwidth * network.memory_efficiency)
        messages = (local + nodes - 2) * network.message_overhead
        return 2 * network.latency + (inside + outside) / network.link_efficiency + messages + copy


def _transpose(rows, first, second):
    """Transpose blocks [first][second] -> [second][first]."""
    blocks = rows.view(first, second, rows.shape[0] // (first * second), *rows.shape[1:])
    return blocks.transpose(0, 1).reshape(rows.shape)


def _sums(values_P, nodes, local, axis):
    """Return sums of [nodes][local] numbers over the nodes (axis 0) or the ranks of each (1)."""
    table = [values_P[a * local : (a + 1) * local] for a in range(nodes)]
    return [sum(line) for line in (zip(*table, strict=True) if axis == 0 else table)]


def _transposed_order(count_AI, num_rows):
    """Return the indices of rows in block order [a][i] among rows in block order [i][a].

    ``count_AI``, int64 [N, m], has the rows of each block. [[1, 2], [1, 0]] -> [0, 2, 3, 1]: block
    (1, 0) lies between the blocks (0, 0) and (0, 1).
    """
    ends_IA = count_AI.t().reshape(-1).cumsum(0).view(count_AI.t().shape)
    first_AI = ends_IA.t() - count_AI
    count, ends = count_AI.flatten(), count_AI.flatten().cumsum(0)
    shift = first_AI.flatten() - (ends - count)
    rows = torch.arange(num_rows, device=count_AI.device)
    return rows + shift.repeat_interleave(count, output_size=num_rows)
