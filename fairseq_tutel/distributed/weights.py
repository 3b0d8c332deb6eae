"""Weights of experts gathered from the ranks that hold them; their gradients go back.

The slices of an expert are its hidden units in neighbouring parts (:mod:`.slices`). What is
gathered lives until the backward pass has used it, as activations do; with activation checkpointing
it is gathered anew there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .flows import Flow
from .gather import all_gather_tensor


def gather_weights(params: Sequence[torch.Tensor], flow: Flow) -> tuple[torch.Tensor, ...]:
    """The weights with which this rank computes in a flow. Differentiable; collective.

    The gradient of each holder's weights is the sum over the ranks that gathered them, added in
    fp32 (fp64). fc2's bias is added to the outputs once: its gradient is zero on the other holders.

    Args:
        params: fc1's weight [e, F/S, M] and bias [e, F/S], fc2's [e, M, F/S] and [e, M].
        flow: of the placement in which they are held.

    Returns:
        the same with more experts and hidden units; those of the parameters where none are
        gathered.
    """
    w1, b1, w2, b2 = _Gather.apply(flow, *params)
    slices, experts = flow.gathered
    if flow.gather_size > 1:
        # [slices, experts] of the ranks -> [experts, F']
        w1 = w1.view(slices, experts, *w1.shape[2:]).transpose(0, 1).flatten(1, 2)
        b1 = b1.view(slices, experts, *b1.shape[2:]).transpose(0, 1).flatten(1, 2)
        w2 = w2.view(slices, experts, *w2.shape[2:]).permute(1, 2, 0, 3).flatten(2, 3)
    if flow.r == 0 and flow.gather_size > 1:
        b2 = b2.view(slices, experts, -1)[0]
    return w1, b1, w2, b2


class _Gather(torch.autograd.Function):
    """All weights in one node, so that the collectives have one order on all ranks.

    A rank whose copy of fc2's bias is not added goes through it as well: hosts may reduce the
    gradient of a copy as it arrives, which it therefore does on every holder.
    """

    @staticmethod
    def forward(ctx, flow, *params):
        ctx.flow = flow
        *cut, b2 = params
        if flow.r == 0:
            return *(_all_gather(param, flow) for param in cut), _all_gather(b2, flow)
        b2 = b2.clone() if flow.has_output_bias else torch.zeros_like(b2)
        return *(_all_gather(param, flow) for param in cut), b2

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        flow, (*d_cut, d_b2) = ctx.flow, grads
        *needs, needs_b2 = ctx.needs_input_grad[1:]
        found = [
            _reduce_scatter(grad, flow) if needed else None
            for grad, needed in zip(d_cut, needs, strict=True)
        ]
        if not needs_b2:
            d_b2 = None
        elif flow.r == 0:
            d_b2 = _reduce_scatter(d_b2, flow)
        elif not flow.has_output_bias:
            d_b2 = torch.zeros_like(d_b2)
        return None, *found, d_b2


def _all_gather(param: torch.Tensor, flow: Flow) -> torch.Tensor:
    """[n, ...] of n ranks, or the parameter as it is."""
    ranks = flow.gather_size
    if ranks == 1:
        return param.view_as(param)
    if flow.groups.simulated:
        return param.detach().expand(ranks, *param.shape).clone()
    gathered = param.new_empty((ranks, *param.shape))
    all_gather_tensor(gathered.flatten(), param.detach().contiguous().flatten(), flow.gather_group)
    return gathered


def _reduce_scatter(grad: torch.Tensor, flow: Flow) -> torch.Tensor:
    """This rank's part [...] of the sum over n ranks of [n, ...].

    As an all-to-all and a sum in fp32: as many bytes as a reduce-scatter, which would round half
    precision after each addition, and which gloo has in recent versions of torch only.
    """
    ranks = flow.gather_size
    if ranks == 1:
        return grad
    parts = grad.contiguous()
    if not flow.groups.simulated:
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(received.flatten(1), parts.flatten(1), group=flow.gather_group)
        parts = received
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return parts.sum(0, dtype=wide).to(grad.dtype)
