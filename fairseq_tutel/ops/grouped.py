"""Matrix product of each expert with its own rows of a ragged buffer."""

from __future__ import annotations

import torch


def grouped_linear(
    rows_RM: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """``rows[begin_x : end_x] @ weight[x].T`` for every expert x.

    The product itself is torch's: ``grouped_mm`` on GPUs for the dtypes and sizes that it takes,
    otherwise one product per expert, for which the host reads the row counts (on a CPU this is also
    the faster way).

    Args:
        rows_RM: [R, M].
        weight: [e, N, M].
        offsets: int32 [e], end row of each expert, ascending.

    Returns:
        [R, N]; rows after the last end are undefined, and so is their input gradient.
    """
    if rows_RM.is_cuda and _grouped_mm_takes(rows_RM, weight):
        return torch.nn.functional.grouped_mm(rows_RM, weight.transpose(1, 2), offs=offsets)
    return _LoopedLinear.apply(rows_RM, weight, offsets)


def _grouped_mm_takes(rows_RM, weight):
    """grouped_mm wants rows that begin at multiples of 16 bytes."""
    widths = (weight.shape[1], weight.shape[2])
    aligned = all(n * rows_RM.element_size() % 16 == 0 for n in widths)
    return aligned and rows_RM.dtype in (torch.bfloat16, torch.float16, torch.float32)


class _LoopedLinear(torch.autograd.Function):
    """One product per expert, written in place into one output."""

    @staticmethod
    def forward(ctx, rows_RM, weight, offsets):
        ctx.save_for_backward(rows_RM, weight)
        ends = offsets.tolist()
        ctx.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        out = rows_RM.new_empty(rows_RM.shape[0], weight.shape[1])
        for expert, (begin, end) in enumerate(ctx.spans):
            if end > begin:
                torch.mm(rows_RM[begin:end], weight[expert].t(), out=out[begin:end])
        return out

    @staticmethod
    def backward(ctx, grad):
        rows_RM, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = torch.empty_like(rows_RM) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for expert, (begin, end) in enumerate(ctx.spans):
            if grad_rows is not None and end > begin:
                torch.mm(grad[begin:end], weight[expert], out=grad_rows[begin:end])
            if grad_weight is not None:
                torch.mm(grad[begin:end].t(), rows_RM[begin:end], out=grad_weight[expert])
        return grad_rows, grad_weight, None
