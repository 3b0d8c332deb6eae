"""Gating once more, from its description alone: one token, one choice after the other.

For softmax scores, K <= 2 and no other options it is that of fairseq's ``moe`` branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Gating:
    """What the tests compare."""

    weight_TE: Tensor  # differentiable, zero where a token is not sent there
    place: dict[tuple[int, int], tuple[int, int]]  # (token, choice) -> (expert, position in it)
    routed_E: list[int]  # pairs by expert, before dropping and re-routing
    num_null: int  # pairs of null experts
    num_full: int  # pairs that found their expert full
    capacity: float
    loss: Tensor  # differentiable
    metrics: dict[str, float]


def capacity_of(config, tokens: int, training: bool) -> float:
    """Slots per expert, by the sentences that define them; ``math.inf`` for no limit."""
    if not training and config.eval_capacity_token_fraction > 0:
        return math.ceil(config.eval_capacity_token_fraction * tokens)
    factor = config.capacity_factor if training else config.eval_capacity_factor
    if factor == 0:
        return math.inf
    even = math.ceil(tokens / (config.num_experts + config.null_experts))
    return max(1, config.top_k * int(abs(factor) * even))


def gating(
    logits_TE: Tensor,
    config,
    training: bool,
    *,
    pad_T: Tensor | None = None,
    bias_E: Tensor | None = None,
    seed: int | None = None,
) -> Gating:
    """Route T tokens to E experts, and null experts behind those; ``bias_E`` is on the selection.

    ``seed``: of what the policies draw; the generator is left where it was then.
    """
    (tokens, outputs), experts, top_k = logits_TE.shape, config.num_experts, config.top_k
    sigmoid = config.score_function == "sigmoid"
    score_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(1)
    prob_TE = score_TE / score_TE.sum(1, keepdim=True) if sigmoid else score_TE
    key_TE = (score_TE if sigmoid else logits_TE).detach() + (0 if bias_E is None else bias_E)
    later_TE, drawn_T, uniform_TK = _draws(config, training, key_TE, seed)
    live = [t for t in range(tokens) if pad_T is None or not pad_T[t]]
    capacity = capacity_of(config, tokens, training)

    order = []  # of all outputs, by token
    for key, later in zip(key_TE.tolist(), later_TE.tolist(), strict=True):
        first = max(range(outputs), key=lambda e: key[e])
        rest = [e for e in range(outputs) if e != first]
        order.append([first, *sorted(rest, key=lambda e: -later[e])])

    def total(pairs):
        """[T], sum of the scores of these pairs of each token."""
        t, e = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
        sums_T = score_TE.new_zeros(tokens).index_add(0, t, score_TE[t, e])
        return sums_T.clamp(min=torch.finfo(sums_T.dtype).eps)

    chosen = [[(t, order[t][k]) for t in live] for k in range(top_k)]
    # Meta's histograms count padding
    with_padding = config.balance_over != "unpadded" and outputs == experts
    counted = range(tokens) if with_padding else live
    shown = [[(t, order[t][k]) for t in counted] for k in range(top_k)]
    gate_TE, divisor_T = score_TE, None
    if top_k > 1 and config.normalize_before_dropping:
        of_all = [[(t, order[t][k]) for t in range(tokens)] for k in range(top_k)]
        divisor_T = total([(t, e) for pairs in of_all for t, e in pairs if e < experts])
        gate_TE = score_TE / divisor_T[:, None]

    def rejected(t, k):
        return (
            uniform_TK is not None and k > 0 and top_k * gate_TE[t, order[t][k]] <= uniform_TK[t, k]
        )

    def in_turn(pairs):
        """(token, expert, choice) in the order in which they take slots; sorting is stable."""
        if config.batch_prioritized:
            return sorted(pairs, key=lambda p: -score_TE[p[0], order[p[0]][0]])
        if drawn_T is not None:
            return sorted(pairs, key=lambda p: -drawn_T[p[0]])
        if config.drop_policy == "probability":
            return sorted(pairs, key=lambda p: -score_TE[p[0], p[1]])
        return pairs

    rounds = [
        [(t, e, k) for t, e in chosen[k] if e < experts and not rejected(t, k)]
        for k in range(top_k)
    ]
    routed = [e for pairs in rounds for _, e, _ in pairs]
    num_routed_K = [len(pairs) for pairs in rounds]
    if config.drop_policy == "probability":
        rounds = [[pair for pairs in rounds for pair in pairs]]
    taken, place, lost = [0] * experts, {}, []

    def take(t, e, k):
        if e >= experts or taken[e] >= capacity:
            return False
        place[t, k] = e, taken[e]
        taken[e] += 1
        return True

    for pairs in rounds:
        lost += [(t, k) for t, e, k in in_turn(pairs) if not take(t, e, k)]
    full_K = [sum(k == j for _, k in lost) for j in range(top_k)]
    for r in range(top_k, min(top_k + config.overflow_rerouting, outputs)):
        trying = dict(sorted(lost, reverse=True))  # the first choice of each token that is lost
        for t, e, k in in_turn([(t, order[t][r], trying[t]) for t in sorted(trying)]):
            if take(t, e, k):
                lost.remove((t, k))

    kept = [(t, e) for (t, _), (e, _) in place.items()]
    weight_TE = score_TE[:, :experts] * 0
    if kept:
        t, e = torch.tensor(kept).unbind(1)
        weight = score_TE[t, e]
        if top_k > 1 and not config.unnormalized_weights:
            weight = weight / (total(kept) if divisor_T is None else divisor_T)[t]
        weight_TE = weight_TE.index_put((t, e), config.route_scale * weight)
    return Gating(
        weight_TE,
        place,
        [routed.count(e) for e in range(experts)],
        sum(e >= experts for pairs in chosen for _, e in pairs),
        sum(full_K),
        capacity,
        _loss(logits_TE, prob_TE, chosen, live, config),
        _metrics(prob_TE.detach(), shown, num_routed_K, full_K, experts),
    )


def _draws(config, training, key_TE, seed):
    """Keys of choices after the first; draws of tokens; draws of pairs."""
    drawn_T = uniform_TK = None
    with torch.random.fork_rng([]):
        torch.manual_seed(seed or 0)
        several = training and config.top_k > 1
        if several and config.second_expert_policy == "sampling":
            key_TE = key_TE - torch.empty_like(key_TE).exponential_().log()
        if training and config.drop_policy == "random":
            drawn_T = torch.rand(len(key_TE), dtype=key_TE.dtype)
        if several and config.second_expert_policy == "random":
            uniform_TK = torch.rand(len(key_TE), config.top_k, dtype=key_TE.dtype)
    return key_TE, drawn_T, uniform_TK


def _loss(logits_TE, prob_TE, chosen, live, config):
    """E * sum_e mean probability * share of the choices; and the weighted z-loss."""
    tokens = range(len(prob_TE)) if config.balance_over == "all" else live
    count, outputs = max(len(tokens), 1), prob_TE.shape[1]
    counted = chosen[:1] if config.balance_choices == "first" else chosen
    experts = [e for pairs in counted for _, e in pairs]
    chosen_E = prob_TE.new_tensor([experts.count(e) for e in range(outputs)])
    share_E = chosen_E / (count * len(counted))
    mean_E = prob_TE[list(tokens)].sum(0) / count
    z_loss = logits_TE[list(tokens)].logsumexp(1).square().sum() / count
    return outputs * (mean_E * share_E).sum() + config.z_loss_weight * z_loss


def _metrics(prob_TE, chosen, num_routed_K, full_K, experts):
    tokens = max(len(prob_TE), 1)
    metrics = {"all_to_all_cpu_time_ms": 0.0, "all_to_all_cuda_time_ms": 0.0}
    metrics["entropy_gating"] = (
        -sum(p * math.log(p) for p in prob_TE.flatten().tolist() if p) / tokens
    )
    share = max(1, math.ceil(experts * 0.2))
    for k in (0, 1):
        name, percent, lost = f"expert{k + 1}", [0.0] * experts, 0.0
        if k < len(chosen):
            of_choice = [e for _, e in chosen[k]]
            percent = [100 * of_choice.count(e) / tokens for e in range(experts)]
            if len(chosen) > 1 and num_routed_K[k]:
                lost = 100 * full_K[k] / num_routed_K[k]
        percent.sort(reverse=True)
        metrics[f"overflow_{name}"] = lost
        metrics[f"{name}_balance_top"] = sum(percent[:share])
        metrics[f"{name}_balance_bottom"] = sum(percent[-share:])
        metrics[f"unused_{name}_count"] = float(percent.count(0.0)) if k < len(chosen) else 0.0
    return metrics
