"""The two-dimensional hierarchical all-to-all (2DH): inside the nodes first, then between them.

Tutel (Hwang et al., arXiv 2206.03382, section 4.1 and appendix A). With N nodes of m ranks, rank
(a, i) sends one message to each of the m ranks of its node and one to each of the N ranks (., i),
m + N - 2 messages that leave it in place of W - 1: gains where the cost per message dominates (many
ranks, small parts), loses where the bandwidth inside a node does. L rows for each rank::

    sent        [i'][a'][L]   for rank (a', i'), in the order that dispatch writes: send_order
    intra-node  [i''][a'][L]  now on rank (a, i'): from rank (a, i'') of the node, for (a', i')
    transpose   [a'][i''][L]  the only copy
    inter-node  [a''][i''][L] on rank (a', i'): from rank (a'', i''), in rank order

``back`` runs the steps backwards. The algorithm of the paper starts with another transposition (it
sends from rank order) and ends its way back with one; here dispatch and combine read and write the
rows in the order that the first message needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..gather import data_device
from .base import Exchange, Parts, chunk_sizes
from .linear import LinearExchange
from .registry import register_exchange


class _Steps(NamedTuple):
    """Rows of an uneven exchange between the two collectives, as the DISPATCH leg has them.

    Attributes:
        intra: (rows to, rows from) each of the m ranks of the node.
        inter: (rows to, rows from) each of the N ranks of equal position.
        order: int64, where each row of the inter-node message comes from in the intra-node one.
    """

    intra: tuple[list[int], list[int]]
    inter: tuple[list[int], list[int]]
    order: torch.Tensor


@register_exchange("2dh")
class TwoDimensionalExchange(Exchange):
    """Hierarchical, inside the nodes first: fewer and larger messages, for many nodes.

    Two collectives, of m ranks and of N, and one transposition of blocks between them.
    """

    needs_nodes = True

    @property
    def shape(self) -> tuple[int, int]:
        """(N, m): nodes, and ranks on each."""
        return self.groups.ep_size // self.ranks_per_node, self.ranks_per_node

    @property
    def send_order(self) -> list[int]:
        """Rank of each part: the ranks of equal position one after the other."""
        nodes, local = self.shape
        return [a * local + i for i in range(local) for a in range(nodes)]

    @classmethod
    def unfit(cls, num_ranks, ranks_per_node):
        """One node, or one rank per node, or nodes that are not alike."""
        if not ranks_per_node or num_ranks % ranks_per_node and ranks_per_node % num_ranks:
            return "the nodes do not hold equal numbers of neighbouring ranks"
        if ranks_per_node >= num_ranks:
            return f"the {num_ranks} ranks of an exchange are on one node"
        if ranks_per_node == 1:
            return "each node has one rank"
        return None

    @classmethod
    def partitions(cls, num_ranks, ranks_per_node):
        """Ranks of one node, and ranks of equal position on their nodes."""
        m = ranks_per_node
        return {
            "intra": [list(range(first, first + m)) for first in range(0, num_ranks, m)],
            "inter": [list(range(i, num_ranks, m)) for i in range(m)],
        }

    def move(self, rows, received, leg, parts):
        """Two collectives."""
        (nodes, local), steps = self.shape, None if parts is None else parts.steps
        if leg.outward:
            got = self._collective("intra", rows, steps, outward=True)
            rows = _transpose(got, local, nodes) if steps is None else got[steps.order]
            self._collective("inter", rows, steps, outward=True, received=received)
            return
        got = self._collective("inter", rows, steps, outward=False)
        if steps is None:
            rows = _transpose(got, nodes, local)
        else:
            rows = torch.empty_like(got).index_copy_(0, steps.order, got)
        self._collective("intra", rows, steps, outward=False, received=received)

    def _collective(self, which, rows, steps, *, outward, received=None):
        to = by = None
        if steps is not None:
            to, by = getattr(steps, which) if outward else getattr(steps, which)[::-1]
        if received is None:
            size = rows.shape[0] if by is None else sum(by)
            received = rows.new_empty((size, *rows.shape[1:]))
        dist.all_to_all_single(received, rows, by, to, group=self.subgroups[which])
        return received

    def share_chunks(self, count_E, degree):
        """The counts travel as the rows will, which leaves those of the step between behind."""
        nodes, local = self.shape
        count_ANL = count_E.to(torch.int64).view(nodes, local, -1)  # by node, rank on it, expert
        sent = count_ANL.transpose(0, 1).contiguous()
        from_node = torch.empty_like(sent)
        dist.all_to_all_single(from_node, sent, group=self.subgroups["intra"])
        through = from_node.transpose(0, 1).contiguous()
        received = torch.empty_like(through)
        dist.all_to_all_single(received, through, group=self.subgroups["inter"])
        count_DWL = chunk_sizes(received, degree).view(degree, nodes * local, -1)
        sent_DAN = chunk_sizes(count_ANL, degree).sum(3)
        # [chunk, a', i'']: rows that came from (a, i'') for node a'
        between_DAN = chunk_sizes(through, degree).sum(3)
        sizes = (sent_DAN.flatten(1), count_DWL.sum(2), between_DAN.flatten(1))
        chunks = []
        for number, (sent_W, received_W, between_W) in enumerate(torch.stack(sizes, 1).tolist()):
            intra = (_sums(sent_W, nodes, local, 0), _sums(between_W, nodes, local, 0))
            inter = (_sums(between_W, nodes, local, 1), _sums(received_W, nodes, local, 1))
            order = _transposed_order(between_DAN[number], sum(between_W))
            parts = Parts(sent_W, received_W, _Steps(intra, inter, order))
            chunks.append((count_DWL[number], parts))
        return chunks

    def parts(self, sent_W, received_W):
        """Counts of the step between are exchanged, too: a collective call."""
        device = data_device(self.groups.ep_group)
        _, parts = self.share_counts(torch.tensor(list(sent_W), device=device))
        if list(parts.received_W) != list(received_W):
            raise ValueError(f"{parts.received_W} rows come from the ranks, not {received_W}")
        return parts

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        """Both collectives and one copy; where it does not fit, the linear exchange."""
        local = links.gpus_per_node
        if cls.unfit(num_ranks, local):
            return LinearExchange.predict(num_bytes, num_ranks, links)
        nodes = num_ranks // local
        inside = num_bytes * (local - 1) / local / (links.node_bandwidth or math.inf)
        outside = num_bytes * (nodes - 1) / nodes / (links.network_bandwidth or math.inf)
        copy = 2 * num_bytes / (links.memory_bandwidth * links.memory_efficiency)
        messages = (local + nodes - 2) * links.message_overhead
        return 2 * links.latency + (inside + outside) / links.link_efficiency + messages + copy


def _transpose(rows, first, second):
    """Blocks [first][second] -> [second][first]."""
    blocks = rows.view(first, second, rows.shape[0] // (first * second), *rows.shape[1:])
    return blocks.transpose(0, 1).reshape(rows.shape)


def _sums(values_W, nodes, local, axis):
    """Sums of [nodes][local] numbers over the nodes (axis 0) or over the ranks on each (1)."""
    table = [values_W[a * local : (a + 1) * local] for a in range(nodes)]
    return [sum(line) for line in (zip(*table, strict=True) if axis == 0 else table)]


def _transposed_order(count_AI, num_rows):
    """Where the rows of blocks in the order [a][i] lie when the blocks are in the order [i][a].

    Args:
        count_AI: int64 [N, m], rows of each block.

    Example:
        [[1, 2], [1, 0]] -> [0, 2, 3, 1]: block (1, 0) lies behind (0, 0), before (0, 1).
    """
    ends_IA = count_AI.t().reshape(-1).cumsum(0).view(count_AI.t().shape)
    first_AI = ends_IA.t() - count_AI
    count, ends = count_AI.flatten(), count_AI.flatten().cumsum(0)
    shift = first_AI.flatten() - (ends - count)
    rows = torch.arange(num_rows, device=count_AI.device)
    return rows + shift.repeat_interleave(count, output_size=num_rows)
