"""Gating of fairseq's ``moe`` branch once more, from its description, with dense [T, E] masks.

Written without a look at :mod:`fairseq_tutel`: every choice is a 0/1 mask over experts, locations
are cumulative sums over tokens. Slow and obvious. Choices beyond the second continue the pattern of
the first two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Gating:
    """What the tests compare: all weights by expert, zero where a token is not sent there."""

    weight_TE: Tensor  # differentiable
    kept_KTE: Tensor  # bool, pairs that reach an expert
    location_KT: Tensor  # position within the expert, -1 where not routed; also beyond capacity
    loss: Tensor  # differentiable
    metrics: dict[str, float]


def train_capacity(tokens: int, experts: int, top_k: int) -> int:
    """Slots per expert in training on the branch: ceil(T/E) for each choice."""
    return top_k * math.ceil(tokens / experts)


def gating(
    logits_TE: Tensor,
    top_k: int,
    capacity: float,
    *,
    gumbel_TE: Tensor | None = None,
    uniform_TK: Tensor | None = None,
    pad_T: Tensor | None = None,
    normalize_before: bool = False,
    prioritized: bool = False,
) -> Gating:
    """Route T tokens.

    Args:
        capacity: slots per expert, ``math.inf`` for no limit.
        gumbel_TE: noise of the policy ``sampling``.
        uniform_TK: draws of the policy ``random``; column 0 is not looked at.
    """
    tokens, experts = logits_TE.shape
    prob_TE = logits_TE.softmax(1)
    eps = torch.finfo(prob_TE.dtype).eps

    chosen_KTE = []
    for k in range(top_k):
        score_TE = prob_TE if k == 0 else logits_TE if gumbel_TE is None else logits_TE + gumbel_TE
        for mask_TE in chosen_KTE:
            score_TE = score_TE.masked_fill(mask_TE, -math.inf)
        chosen_KTE.append(F.one_hot(score_TE.argmax(1), experts).bool())
    gate_KT = [(prob_TE * mask_TE).sum(1) for mask_TE in chosen_KTE]
    if normalize_before and top_k > 1:
        total_T = sum(gate_KT).clamp(min=eps)
        gate_KT = [gate_T / total_T for gate_T in gate_KT]

    routed_KTE = [mask_TE.clone() for mask_TE in chosen_KTE]
    if uniform_TK is not None:
        for k in range(1, top_k):
            routed_KTE[k] &= (top_k * gate_KT[k] > uniform_TK[:, k])[:, None]
    if pad_T is not None:
        routed_KTE = [mask_TE & ~pad_T[:, None] for mask_TE in routed_KTE]

    order_T = torch.arange(tokens)
    if prioritized:
        order_T = prob_TE.max(1).values.argsort(descending=True, stable=True)
    kept_KTE, location_KT, before_E = [], [], torch.zeros(experts, dtype=torch.int64)
    for mask_TE in routed_KTE:
        location_TE = torch.empty(tokens, experts, dtype=torch.int64)
        location_TE[order_T] = mask_TE[order_T].long().cumsum(0) - 1
        location_TE += before_E
        before_E = before_E + mask_TE.sum(0)
        kept_KTE.append(mask_TE & (location_TE < capacity))
        location_KT.append(torch.where(mask_TE, location_TE, -1).max(1).values)

    if top_k > 1 and not normalize_before:
        gate_KT = [(prob_TE * mask_TE).sum(1) for mask_TE in kept_KTE]
        total_T = sum(gate_KT).clamp(min=eps)
        gate_KT = [gate_T / total_T for gate_T in gate_KT]
    weight_TE = sum(
        gate_T[:, None] * mask_TE for gate_T, mask_TE in zip(gate_KT, kept_KTE, strict=True)
    )
    divisor = max(tokens, 1)
    loss = (
        experts**2
        * (prob_TE.sum(0) / divisor * (routed_KTE[0].to(prob_TE.dtype).sum(0) / divisor)).mean()
    )
    if pad_T is not None:  # padding is on no expert
        chosen_KTE = [mask_TE & ~pad_T[:, None] for mask_TE in chosen_KTE]
    return Gating(
        weight_TE,
        torch.stack(kept_KTE),
        torch.stack(location_KT),
        loss,
        _metrics(prob_TE.detach(), chosen_KTE, routed_KTE, kept_KTE),
    )


def _metrics(prob_TE, chosen_KTE, routed_KTE, kept_KTE):
    tokens, experts = prob_TE.shape
    metrics = {"all_to_all_cpu_time_ms": 0.0, "all_to_all_cuda_time_ms": 0.0}
    entropy = 0.0
    for p in prob_TE.flatten().tolist():
        entropy -= p * math.log(p) if p > 0 else 0.0
    metrics["entropy_gating"] = entropy / max(tokens, 1)
    share = max(1, math.ceil(experts * 0.2))
    for k in (0, 1):
        name = f"expert{k + 1}"
        for key in ("overflow_{}", "{}_balance_top", "{}_balance_bottom", "unused_{}_count"):
            metrics[key.format(name)] = 0.0
        if k >= len(chosen_KTE):
            continue
        count_E = sorted(chosen_KTE[k].sum(0).tolist(), reverse=True)
        percent = [100 * n / max(tokens, 1) for n in count_E]
        metrics[f"{name}_balance_top"] = sum(percent[:share])
        metrics[f"{name}_balance_bottom"] = sum(percent[-share:])
        metrics[f"unused_{name}_count"] = float(percent.count(0.0))
        routed, kept = int(routed_KTE[k].sum()), int(kept_KTE[k].sum())
        if len(chosen_KTE) > 1 and routed:
            metrics[f"overflow_{name}"] = 100 * (routed - kept) / routed
    return metrics
