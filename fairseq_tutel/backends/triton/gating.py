"""Softmax, top-k and the sums over tokens in one pass over the logits, and its gradient.

Source of the gating: GShard (Lepikhin et al. 2020, arXiv 2006.16668), for any K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._autotune import GATING_PROGRAMS, GATING_TILE, SCAN_BLOCK_COLS, SCAN_BLOCK_ROWS
from ._runtime import FP32, INT32, checked, device_guard
from ._sizes import cdiv, next_power_of_2

_DYNAMIC = ["num_tokens", "num_blocks", "num_partials"]
# The smallest finite fp32 number, to which logits are clamped as by the twin.
_FLOOR = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit(do_not_specialize=_DYNAMIC)
def _topk_gating_fwd_kernel(
    expert_ptr,  # (T, K) int32 - output: chosen experts, -1 in padded rows
    choice_ptr,  # (T, K) int32 - output: chosen experts of all rows, with pad_ptr
    gate_ptr,  # (T, K) fp32 - output: softmax at the chosen experts
    lse_ptr,  # (T,) fp32 - output: logsumexp of the logits
    partial_ptr,  # (P, E + 1) fp32 - output: this program's sums of p, and of the entropy
    logits_ptr,  # (T, E) fp32
    noise_ptr,  # (T, E) fp32 - or None; added when choices after the first are selected
    pad_ptr,  # (T,) bool - True for padding; or None
    key_ptr,  # (T, E) fp32 - or None; selects the experts in place of the logits
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (P,); program p takes the blocks of BLOCK_T tokens p, p + P, p + 2 P, ...

    Example: logits [[0, ln 2, ln 5]], K = 2 -> p = [1/8, 2/8, 5/8], expert [[2, 1]],
    gate [[5/8, 2/8]], lse [ln 8]. With keys [[9, 0, 1]]: expert [[0, 2]], gate [[1/8, 5/8]].
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    prob_sum = tl.zeros([BLOCK_E], tl.float32)
    entropy = tl.zeros([BLOCK_T], tl.float32)
    for block in range(pid, num_blocks, tl.num_programs(0)):
        offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_tokens
        mask = mask_t[:, None] & mask_e[None, :]
        offs = offs_t[:, None] * E + offs_e[None, :]
        logits = tl.load(logits_ptr + offs, mask=mask, other=0.0)
        # The finite floor keeps experts that the caller disabled with -inf apart from taken ones
        # and makes a row of them uniform. No maximum, which would hide a NaN.
        logits = tl.where(logits < _FLOOR, _FLOOR, logits)
        top = tl.max(tl.where(mask_e[None, :], logits, float("-inf")), axis=1)
        exps = tl.where(mask_e[None, :], tl.exp(logits - top[:, None]), 0.0)
        total = tl.sum(exps, axis=1)
        prob = exps / total[:, None]
        lse = top + tl.log(total)
        tl.store(lse_ptr + offs_t, lse, mask=mask_t)
        prob_sum += tl.sum(tl.where(mask, prob, 0.0), axis=0)
        # A probability of 0 contributes 0, also where the difference overflows; NaN shows.
        surprise = tl.where(mask & (prob != 0.0), prob * (lse[:, None] - logits), 0.0)
        entropy += tl.sum(surprise, axis=1)

        if pad_ptr is not None:
            pad = tl.load(pad_ptr + offs_t, mask=mask_t, other=0) != 0
        score = logits
        if key_ptr is not None:
            score = tl.load(key_ptr + offs, mask=mask, other=0.0)
            score = tl.where(score < _FLOOR, _FLOOR, score)
        if noise_ptr is not None:
            score += tl.load(noise_ptr + offs, mask=mask, other=0.0)
        # NaN counts as the largest, as in torch, so that no lane past the last expert is elected.
        score = tl.where(score == score, score, float("inf"))
        score = tl.where(mask_e[None, :], score, float("-inf"))
        key = tl.where(prob == prob, prob, float("inf"))
        key = tl.where(mask_e[None, :], key, -1.0)
        if key_ptr is not None:
            key = score
        for k in range(TOP_K):
            choice = tl.argmax(key, axis=1)
            taken = offs_e[None, :] == choice[:, None]
            gate = tl.sum(tl.where(taken, prob, 0.0), axis=1)
            score = tl.where(taken, float("-inf"), score)
            key = score
            offs_k = offs_t * TOP_K + k
            tl.store(gate_ptr + offs_k, gate, mask=mask_t)
            if pad_ptr is not None:
                tl.store(choice_ptr + offs_k, choice, mask=mask_t)
                choice = tl.where(pad, -1, choice)
            tl.store(expert_ptr + offs_k, choice, mask=mask_t)
    tl.store(partial_ptr + pid * (E + 1) + offs_e, prob_sum, mask=mask_e)
    tl.store(partial_ptr + pid * (E + 1) + E, tl.sum(entropy, axis=0))


@triton.jit(do_not_specialize=_DYNAMIC)
def _topk_gating_sums_kernel(
    prob_sum_ptr,  # (E,) fp32 - output
    entropy_ptr,  # () fp32 - output
    partial_ptr,  # (P, E + 1) fp32
    num_partials,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (cdiv(E + 1, BLOCK_E),); adds up the programs' sums in a fixed order.

    Example: partial [[1, 2, 0.5], [3, 4, 0.25]] -> prob_sum [4, 6], entropy 0.75.
    """
    offs_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, num_partials, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (offs_p < num_partials)[:, None] & (offs_e < E + 1)[None, :]
        offs = offs_p[:, None] * (E + 1) + offs_e[None, :]
        acc += tl.sum(tl.load(partial_ptr + offs, mask=mask, other=0.0), axis=0)
    tl.store(prob_sum_ptr + offs_e, acc, mask=offs_e < E)
    tl.store(entropy_ptr + offs_e * 0, acc, mask=offs_e == E)


@triton.jit(do_not_specialize=_DYNAMIC)
def _topk_gating_bwd_kernel(
    d_logits_ptr,  # (T, E) fp32 - output
    d_gate_ptr,  # (T, K) fp32, or None
    d_prob_sum_ptr,  # (E,) fp32, or None
    d_lse_ptr,  # (T,) fp32, or None
    logits_ptr,  # (T, E) fp32
    lse_ptr,  # (T,) fp32
    choice_ptr,  # (T, K) int32 - chosen experts, of padded rows too
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_T),); d_logits = p * (g - <p, g> + d_lse), g = dL/dp.

    Example: logits [[0, 0]], choice [[1]], d_gate [[1]], the others 0 -> [[-1/4, 1/4]].
    """
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    mask_t = offs_t < num_tokens
    mask_e = offs_e < E
    mask = mask_t[:, None] & mask_e[None, :]
    offs = offs_t[:, None] * E + offs_e[None, :]
    logits = tl.load(logits_ptr + offs, mask=mask, other=float("-inf"))
    lse = tl.load(lse_ptr + offs_t, mask=mask_t, other=0.0)
    prob = tl.exp(logits - lse[:, None])
    grad = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if d_prob_sum_ptr is not None:
        grad += tl.load(d_prob_sum_ptr + offs_e, mask=mask_e, other=0.0)[None, :]
    if d_gate_ptr is not None:
        for k in range(TOP_K):
            choice = tl.load(choice_ptr + offs_t * TOP_K + k, mask=mask_t, other=-1)
            d_gate = tl.load(d_gate_ptr + offs_t * TOP_K + k, mask=mask_t, other=0.0)
            grad += tl.where(offs_e[None, :] == choice[:, None], d_gate[:, None], 0.0)
    inner = tl.sum(prob * grad, axis=1)
    if d_lse_ptr is not None:
        inner -= tl.load(d_lse_ptr + offs_t, mask=mask_t, other=0.0)
    d_logits = prob * (grad - inner[:, None])
    tl.store(d_logits_ptr + offs, d_logits, mask=mask)


@triton.jit
def _scaled_dot_kernel(
    dot_ptr,  # () fp32 - output: scale * <a, b>
    weight_ptr,  # (E,) fp32 - output: scale * b
    a_ptr,  # (E,) fp32
    b_ptr,  # (E,) int32 or int64
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program.

    Example: a [1, 2], b [3, 4], scale 2 -> dot 22, weight [6, 8].
    """
    offs = tl.arange(0, BLOCK_E)
    mask = offs < E
    weight = tl.load(b_ptr + offs, mask=mask, other=0).to(tl.float32) * scale
    tl.store(weight_ptr + offs, weight, mask=mask)
    a = tl.load(a_ptr + offs, mask=mask, other=0.0)
    tl.store(dot_ptr, tl.sum(a * weight, axis=0))


def _tile(num_experts: int) -> tuple[int, int]:
    """Return BLOCK_T and BLOCK_E: a tile has all experts of its tokens."""
    block_e = next_power_of_2(num_experts)
    return max(1, min(32, GATING_TILE // block_e)), block_e


def topk_gating_fwd(
    logits_TE: Tensor,
    top_k: int,
    *,
    noise_TE: Tensor | None = None,
    pad_T: Tensor | None = None,
    key_TE: Tensor | None = None,
    sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.topk_gating_fwd` in Triton, all in fp32."""
    (T, E), device = logits_TE.shape, logits_TE.device
    logits_TE = checked("logits", logits_TE, (T, E), FP32, device)
    noise_TE = checked("noise", noise_TE, (T, E), FP32, device)
    key_TE = checked("key", key_TE, (T, E), FP32, device)
    pad_T = checked("pad", pad_T, (T,), (torch.bool,), device)
    expert_TK = torch.empty((T, top_k), dtype=torch.int32, device=device)
    choice_TK = expert_TK.new_empty((0 if pad_T is None else T, top_k))
    gate_TK, lse_T = logits_TE.new_empty((T, top_k)), logits_TE.new_empty(T)
    prob_sum_E, entropy_sum = (logits_TE.new_empty(s if sums else 0) for s in (E, ()))
    block_t, block_e = _tile(E)
    num_blocks = cdiv(T, block_t)
    num_programs = min(num_blocks, GATING_PROGRAMS)
    if T == 0:
        prob_sum_E.zero_()
        entropy_sum.zero_()
    else:
        partial_PE = logits_TE.new_empty((num_programs, E + 1))
        outputs = (expert_TK, choice_TK, gate_TK, lse_T, partial_PE)
        inputs = (logits_TE, noise_TE, pad_T, key_TE, T, num_blocks)
        with device_guard(logits_TE):
            _topk_gating_fwd_kernel[(num_programs,)](
                *outputs, *inputs, E=E, TOP_K=top_k, BLOCK_T=block_t, BLOCK_E=block_e
            )
            if sums:
                _topk_gating_sums_kernel[(cdiv(E + 1, SCAN_BLOCK_COLS),)](
                    prob_sum_E,
                    entropy_sum,
                    partial_PE,
                    num_programs,
                    E=E,
                    BLOCK_P=SCAN_BLOCK_ROWS,
                    BLOCK_E=SCAN_BLOCK_COLS,
                )
    return expert_TK, gate_TK, prob_sum_E, entropy_sum, lse_T, choice_TK


def topk_gating_bwd(
    d_gate_TK: Tensor | None,
    d_prob_sum_E: Tensor | None,
    d_lse_T: Tensor | None,
    logits_TE: Tensor,
    lse_T: Tensor,
    choice_TK: Tensor,
) -> Tensor:
    """Compute :func:`fairseq_tutel.backends.torch.topk_gating_bwd` in Triton, all in fp32."""
    (T, E), K, device = logits_TE.shape, choice_TK.shape[1], logits_TE.device
    tensors = (
        checked("d_gate", d_gate_TK, (T, K), FP32, device),
        checked("d_prob_sum", d_prob_sum_E, (E,), FP32, device),
        checked("d_lse", d_lse_T, (T,), FP32, device),
        checked("logits", logits_TE, (T, E), FP32, device),
        checked("lse", lse_T, (T,), FP32, device),
        checked("choice", choice_TK, (T, K), INT32, device),
    )
    d_logits_TE = logits_TE.new_empty((T, E))
    if T > 0:
        block_t, block_e = _tile(E)
        with device_guard(logits_TE):
            _topk_gating_bwd_kernel[(cdiv(T, block_t),)](
                d_logits_TE, *tensors, T, E=E, TOP_K=K, BLOCK_T=block_t, BLOCK_E=block_e
            )
    return d_logits_TE


def scaled_dot_fwd(a_E: Tensor, b_E: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute :func:`fairseq_tutel.backends.torch.scaled_dot_fwd` in Triton, in fp32."""
    E, device = len(a_E), a_E.device
    a_E = checked("a", a_E, (E,), FP32, device)
    b_E = checked("b", b_E, (E,), (torch.int32, torch.int64), device)
    dot, weight_E = a_E.new_empty(()), a_E.new_empty(E)
    with device_guard(a_E):
        _scaled_dot_kernel[(1,)](dot, weight_E, a_E, b_E, scale, E=E, BLOCK_E=next_power_of_2(E))
    return dot, weight_E
