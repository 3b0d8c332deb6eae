"""Send the weights of helped experts to their helpers, and the gradients back.

Both transfers run while each rank computes its own rows::

    forward     > weights | own rows | . weights | helped rows
    backward    helped rows | > gradients | own rows | . gradients

(> start, . wait). Each transfer is one all-to-all of the exchange group. An expert's home adds the
helpers' gradients to its own in the order of their ranks, so results do not depend on timing.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..exchanges.exchange import ExchangeRecord
from ..exchanges.streams import Stream, UnderWay
from ..placement.groups import ExpertParallelGroups
from .plan import Move


class WeightMoves(UnderWay):
    """Transfers of one step for one set of stacked weights: :meth:`start`, then :meth:`wait`.

    ``moves`` are those of the whole plan, equal on all ranks. Between start and wait the caller's
    thread runs no collective of the exchange group. ``record`` counts the bytes that this rank
    sends.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        groups: ExpertParallelGroups,
        stream: Stream,
        record: ExchangeRecord | None = None,
    ):
        self._groups, self._stream, self._record = groups, stream, record
        me, local = groups.ep_rank, groups.num_local_experts
        sent = sorted((m.helper, m.expert) for m in moves if m.home == me)
        #: experts that this rank helps, in the order of their numbers
        self.helped = sorted(m.expert for m in moves if m.helper == me)
        self._slots = [expert - me * local for _, expert in sent]
        ranks = range(groups.ep_size)
        self._to_P = [sum(helper == rank for helper, _ in sent) for rank in ranks]
        self._from_P = [sum(expert // local == rank for expert in self.helped) for rank in ranks]
        self._shapes: list[torch.Size] = []  # of one expert's part of each parameter

    def start(
        self, params: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Start to send the weights of helped experts, [e * n, ...]. Differentiable; collective.

        Return the parameters for this rank's own rows, and memory for :meth:`wait`.
        """
        experts = self._groups.num_local_experts
        self._shapes = [
            torch.Size((param.shape[0] // experts, *param.shape[1:])) for param in params
        ]
        *own, unfilled = _Start.apply(self, *params)
        return tuple(own), unfilled

    def wait(
        self, unfilled: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Wait for the weights, in the memory from :meth:`start`. Differentiable.

        ``out`` are outputs of the rank's own rows, whose gradient starts the transfer of gradients.
        Return them, and the parameters [h * n, ...] of the h experts that this rank helps.
        """
        out, packed = _Wait.apply(self, out, unfilled)
        parts = packed.split([shape.numel() for shape in self._shapes], dim=1)
        return out, tuple(
            part.reshape(-1, *shape[1:]) for part, shape in zip(parts, self._shapes, strict=True)
        )

    def _pack(self, params):
        """Return [s, N]: one row of all weights of each expert that is sent."""
        experts = self._groups.num_local_experts
        rows = [param.detach().reshape(experts, -1)[self._slots] for param in params]
        return torch.cat(rows, 1)

    def _send(self, message, to_P, from_P):
        if self._record is not None:
            self._record.bytes_moved += message.nbytes
        received = message.new_empty((sum(from_P), message.shape[1]))

        def travel():
            dist.all_to_all_single(received, message, from_P, to_P, group=self._groups.ep_group)

        self._under_way = self._stream.submit(travel), received, message
        return received

    def _add_helpers(self, grads, arrived):
        """Return gradients [e * n, ...] with those of the helpers added, in the order of ranks."""
        if not self._slots:
            return grads
        parts = arrived.split([shape.numel() for shape in self._shapes], dim=1)
        return [
            None if grad is None else self._add_helpers_of_one(grad, part)
            for grad, part in zip(grads, parts, strict=True)
        ]

    def _add_helpers_of_one(self, grad, part):
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.clone()
        by_expert = grad.view(self._groups.num_local_experts, -1)
        order = sorted(range(len(self._slots)), key=self._slots.__getitem__)  # stable: by helper
        for slot, rows in itertools.groupby(order, key=self._slots.__getitem__):
            total = by_expert[slot].to(wide)
            for row in rows:
                total = total + part[row].to(wide)
            by_expert[slot] = total
        return grad


class _Start(torch.autograd.Function):
    """Start of the weights' transfer. Its backward pass waits for the helpers' gradients."""

    @staticmethod
    def forward(ctx, moves, *params):
        ctx.moves = moves
        unfilled = moves._send(moves._pack(params), moves._to_P, moves._from_P)
        own = [param.view_as(param) for param in params]
        needs = zip(own, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(view for view, needed in needs if not needed))
        return *own, unfilled

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[1:]
        own = [grad if needed else None for grad, needed in zip(grads, needs, strict=False)]
        # the gradient of ``unfilled`` only has the shape that autograd requires
        return None, *ctx.moves._add_helpers(own, ctx.moves._arrive())


class _Wait(torch.autograd.Function):
    """End of the weights' transfer. Its backward pass starts the transfer of their gradients.

    The outputs of a rank's own rows pass through it, so that every rank runs this backward pass.
    """

    @staticmethod
    def forward(ctx, moves, out, unfilled):
        ctx.moves = moves
        moves._arrive()
        ctx.mark_dirty(unfilled)
        return out.view_as(out), unfilled

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_packed):
        moves = ctx.moves
        if ctx.needs_input_grad[2]:  # else the weights are frozen, on all ranks
            moves._send(d_packed.contiguous(), moves._from_P, moves._to_P)
        return None, d_out, d_packed
