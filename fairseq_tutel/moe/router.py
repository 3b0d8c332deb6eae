"""The gate: from tokens to a :class:`Routing` and its losses.

Numerics follow fairseq's ``moe`` branch (top1gate.py, top2gate.py) for K = 1 and 2; larger K
extends its top-2 rules. Where those are wrong this module does the right thing:

- fp32 gating there casts logits that a half-precision product has already rounded. Here half inputs
  are multiplied with fp32 accumulation and fp32 output.
- There, padding and rejected second choices get location 0 and overwrite the first token of an
  expert. Here they get no row at all, and no weight.
- ``sampling`` and ``random`` draw noise in evaluation too there. Here evaluation is deterministic:
  the next best expert is taken and kept.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .. import ops
from ..config import MoEConfig
from . import losses
from .routing import Routing, build_routing, normalize_gates
from .stats import MoEAux, routing_metrics


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


class LinearGate(nn.Module):
    """Logits as a linear map without bias; its weight has the name that fairseq's checkpoints use.

    Args:
        model_dim: M.
        num_experts: E.
        fp32: whether logits leave the product in fp32 (else they are rounded to the input's dtype
            first).
    """

    def __init__(self, model_dim: int, num_experts: int, fp32: bool = True):
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.fp32 = fp32

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] in the model's dtype -> fp32 [T, E] (fp64 stays fp64)."""
        if x_TM.dtype in (torch.float16, torch.bfloat16):
            if self.fp32:
                return _LogitsFp32.apply(x_TM, self.wg.weight)
            return nn.functional.linear(x_TM, self.wg.weight.to(x_TM.dtype)).float()
        if ops.on_cpu_threads(x_TM.device):
            return ops.gate_logits(x_TM, self.wg.weight)
        return self.wg(x_TM)


class CosineGate(nn.Module):
    """Logits as cosines in a projected space over a learned temperature.

    X-MoE, arXiv 2204.09179, section 3.1, with Tutel's defaults: 256 dimensions, initial temperature
    0.5, temperature bounded below by 0.01.
    """

    def __init__(
        self, model_dim: int, num_experts: int, proj_dim: int = 256, init_temperature: float = 0.5
    ):
        super().__init__()
        self.proj = nn.Linear(model_dim, min(proj_dim, model_dim), bias=False)
        self.expert_dirs = nn.Parameter(torch.empty(num_experts, self.proj.out_features))
        nn.init.normal_(self.expert_dirs, std=0.01)
        self.log_scale = nn.Parameter(torch.tensor([math.log(1.0 / init_temperature)]))
        self.max_log_scale = math.log(1.0 / 0.01)

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> fp32 [T, E] (fp64 stays fp64)."""
        dtype = torch.promote_types(x_TM.dtype, torch.float32)
        point_TP = nn.functional.normalize(x_TM.to(dtype) @ self.proj.weight.to(dtype).t(), dim=1)
        dirs_EP = nn.functional.normalize(self.expert_dirs.to(dtype), dim=1)
        scale = self.log_scale.to(dtype).clamp(max=self.max_log_scale).exp()
        return (point_TP @ dirs_EP.t()) * scale


# Gates that choose the dtype of each step themselves.
BUILT_IN_GATES = (LinearGate, CosineGate)


def make_gate(model_dim: int, config: MoEConfig) -> nn.Module:
    """The gate module that ``config`` asks for: [T, M] tokens -> fp32 [T, E] logits."""
    if config.router == "cosine":
        return CosineGate(model_dim, config.num_experts)
    return LinearGate(model_dim, config.num_experts, config.gating_fp32)


def route(
    logits_TE: torch.Tensor,
    config: MoEConfig,
    training: bool,
    *,
    pad_T: torch.Tensor | None = None,
    num_tokens: int | None = None,
) -> tuple[Routing, MoEAux]:
    """From logits to a routing, an aux loss and statistics; a custom gate may call it with its own.

    Args:
        logits_TE: [T, E], with gradient. Half logits are cast to fp32 first: their softmax and
            losses are never computed in half.
        num_tokens: largest T of all ranks, this rank's T if None.

    Raises:
        ValueError: logits for another number of experts.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    tokens, num_experts = logits_TE.shape
    if num_experts != config.num_experts:
        raise ValueError(
            f"the gate gave logits for {num_experts} experts, the layer has {config.num_experts}"
        )
    pad_T = pad_T if config.use_pad_mask else None
    clean_logits_TE = logits_TE
    noise_std = config.gate_noise / num_experts if training else 0.0
    if noise_std > 0:
        logits_TE = logits_TE + noise_std * torch.randn_like(logits_TE)
    gumbel_TE = None
    if training and config.second_expert_policy == "sampling" and config.top_k > 1:
        gumbel_TE = -torch.empty_like(logits_TE).exponential_().log()
    expert_TK, gate_TK, prob_sum_E, entropy_sum, lse_T = ops.topk_gating(
        logits_TE, config.top_k, noise_TE=gumbel_TE, pad_T=pad_T
    )
    priority_T = gate_TK.detach()[:, 0] if config.batch_prioritized else None
    if config.normalize_before_dropping and config.top_k > 1:
        gate_TK = normalize_gates(gate_TK)
    chosen_TK = expert_TK
    if training and config.second_expert_policy == "random" and config.top_k > 1:
        expert_TK = _reject_at_random(expert_TK, gate_TK.detach(), config.top_k)
    routing = build_routing(
        expert_TK,
        gate_TK,
        num_experts,
        capacity=config.capacity(tokens if num_tokens is None else num_tokens, training),
        padded=config.is_static(training),
        priority_T=priority_T,
        normalize_before=config.normalize_before_dropping,
    )
    if config.load_importance_loss and training:
        prob_TE = torch.exp(logits_TE - lse_T[:, None])
        threshold_T = logits_TE.detach().gather(1, chosen_TK[:, -1:].clamp(min=0).long())[:, 0]
        loss = losses.load_importance_loss(prob_TE, clean_logits_TE, threshold_T, noise_std, pad_T)
    else:
        loss = losses.balance_loss(prob_sum_E, routing.num_routed_KE[0], tokens)
    if config.z_loss_weight > 0:
        loss = loss + config.z_loss_weight * losses.z_loss(lse_T)
    chosen_KE = routing.num_routed_KE
    if chosen_TK is not expert_TK:
        chosen_KE = torch.stack([_histogram(chosen_TK[:, k], num_experts) for k in (0, 1)])
    load_E = routing.num_routed_KE.sum(0, dtype=torch.int32)
    aux = MoEAux(
        loss=loss,
        metrics=routing_metrics(routing, chosen_KE, entropy_sum.detach()),
        load_E=load_E,
        needed_capacity=load_E.max(),
    )
    return routing, aux


def _reject_at_random(expert_TK, gate_TK, top_k):
    """Drop choice j > 1 unless ``K * gate_j`` exceeds a uniform draw; first choices stay."""
    keep_TK = top_k * gate_TK > torch.rand_like(gate_TK)
    keep_TK[:, 0] = True
    return torch.where(keep_TK, expert_TK, -1)


def _histogram(expert_T, num_experts):
    # scatter_add_ of integers is deterministic and, unlike bincount, needs no word from the GPU
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_T.device)
    ones = torch.ones_like(expert_T, dtype=torch.int64)
    return counts.scatter_add_(0, expert_T.long() + 1, ones)[1:]
