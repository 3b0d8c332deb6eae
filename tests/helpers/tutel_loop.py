"""Tutel's layer as a loop over tokens, from its published definition; fp64 with gradients."""

import math

import torch
from helpers import naive
from torch.nn.functional import softmax


def slots(scores, top_k, factor, *, priority=False, normalize=True, alignment=1, most=int):
    """(expert, slot, weight) of every pair by token and choice, and the capacity.

    ``most`` maps a number of this rank to the largest of all ranks.
    """
    tokens, experts = scores.shape
    top_k = min(top_k, experts)
    chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    by = scores.amax(1) if priority else None
    slot_TK, count_KE = naive.assign_slots(chosen, experts, by)
    weight = scores.gather(1, chosen)
    if normalize and top_k > 1:
        weight = weight / weight.sum(1, keepdim=True)
    fixed = top_k * int(abs(factor) * math.ceil(most(tokens) / experts))
    capacity = fixed
    if factor <= 0:
        capacity = most(max(map(sum, zip(*count_KE, strict=True))))
        capacity = min(capacity, fixed) if factor else capacity
    return chosen, slot_TK, weight, math.ceil(capacity / alignment) * alignment


def layer(x_TM, logits_TE, expert, top_k, factor, postscore=True, **options):
    """(outputs, balance loss); ``expert(e, row)`` computes one row."""
    scores = softmax(logits_TE, dim=1)
    chosen, slot_TK, weight, capacity = slots(scores, top_k, factor, **options)
    rows = []
    for t, x in enumerate(x_TM):
        parts = [
            w * expert(e, x) if postscore else expert(e, w * x)
            for e, slot, w in zip(chosen[t].tolist(), slot_TK[t], weight[t], strict=True)
            if slot < capacity
        ]
        rows.append(sum(parts, torch.zeros_like(expert(0, x))))
    experts = scores.shape[1]
    first = torch.bincount(chosen[:, 0], minlength=experts).to(scores) / len(x_TM)
    return torch.stack(rows), experts * (scores.mean(0) * first).sum()


def ffn(params, activation=torch.relu):
    """The built-in experts by whole parameters, ``batched_*`` [E, ...]."""

    def expert(e, row):
        hidden = activation(params["batched_fc1_w"][e] @ row + params["batched_fc1_bias"][e])
        return hidden @ params["batched_fc2_w"][e] + params["batched_fc2_bias"][e]

    return expert
