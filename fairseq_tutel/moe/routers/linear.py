"""Logits as a linear map of the tokens, the router of fairseq's ``moe`` branch.

The product of half tokens leaves in fp32, never rounded to half in between, forward and backward.
"""

from __future__ import annotations

import torch
from torch import nn

from ... import ops
from ...config import ROUTERS, MoEConfig
from .base import TopKRouter


class _LogitsFp32(torch.autograd.Function):
    """``x @ w.T`` of half inputs whose output is fp32, never rounded to half in between.

    Its gradients are rounded once, at the end, to the dtype of what they belong to: the weight's
    is fp32 where the weight is (under autocast).
    """

    @staticmethod
    def forward(ctx, x_TM, w_EM):
        ctx.save_for_backward(x_TM, w_EM)
        return _product_of(x_TM)(x_TM, w_EM.t())

    @staticmethod
    def backward(ctx, grad_TE):
        x_TM, w_EM = ctx.saved_tensors
        product = _product_of(x_TM)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_TE, w_EM.to(x_TM.dtype)).to(x_TM.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = product(grad_TE.t(), x_TM).to(w_EM.dtype)
        return grad_x, grad_w


def _product_of(tokens):
    return split_product if tokens.is_cuda else _product_fp32


def _product_fp32(a, b):
    """``a @ b`` in fp32, of halves without rounding."""
    if a.is_cuda:  # on matrix units; torch has no such product on the CPU
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def split_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` on matrix units for half operands, nearly as exact as in fp32.

    fp32 products of the gate's gradient would cost a tenth of the experts' on a GPU. An fp32
    operand is the sum of two halves (of 16 bits of mantissa in bf16, 22 in fp16); each is
    multiplied, with fp32 output, for a few thousandths of the experts' cost.

    Args:
        a: [A, B], fp16, bf16 or fp32.
        b: [B, C]; the two are halves of one dtype, or one half and one fp32.

    Returns:
        fp32 [A, C]; not finite where an operand is not.
    """
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    if a.dtype == b.dtype:
        return _product_fp32(a, b)
    if a.dtype == torch.float32:
        high, low, shift = _split(a, b.dtype)
        product = _product_fp32(high, b) + _product_fp32(low, b)
    else:
        high, low, shift = _split(b, a.dtype)
        product = _product_fp32(a, high) + _product_fp32(a, low)
    return product if shift is None else torch.ldexp(product, -shift)


def _split(wide, dtype):
    """Two halves whose sum is ``2^shift * wide``; a shift of None is none."""
    shift = None
    if dtype == torch.float16:
        # brings the largest number into [2^13, 2^14): it fits, and small ones keep their digits
        shift = (14 - torch.frexp(wide.abs().amax()).exponent).clamp(-100, 100)
        wide = torch.ldexp(wide, shift)
    high = wide.to(dtype)
    return high, (wide - high.float()).to(dtype), shift


@ROUTERS.register("linear")
class LinearRouter(TopKRouter):
    """a linear map without bias (Switch Transformer, GShard).

    Its weight has the name that fairseq's checkpoints use. Without ``config.gating_fp32`` the
    logits of half tokens are rounded to the tokens' dtype first.

    Args:
        model_dim: M.
        config: options of the layer.
    """

    def __init__(self, model_dim: int, config: MoEConfig):
        super().__init__(model_dim, config)
        self.wg = nn.Linear(model_dim, config.num_experts, bias=False)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] in the model's dtype -> fp32 [T, E] (fp64 stays fp64)."""
        if x_TM.dtype in (torch.float16, torch.bfloat16):
            if self.config.gating_fp32:
                return _LogitsFp32.apply(x_TM, self.wg.weight)
            return nn.functional.linear(x_TM, self.wg.weight.to(x_TM.dtype)).float()
        if ops.on_cpu_threads(x_TM.device):
            return ops.gate_logits(x_TM, self.wg.weight)
        return self.wg(x_TM)
