"""Operators, gating and the layer as loops that follow their definitions; slow on purpose."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fairseq_tutel.config.formats import BLOCK

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_accurate": lambda z: functional.gelu(z, approximate="tanh"),
    "gelu_fast": lambda z: functional.gelu(z, approximate="tanh"),
    "linear": lambda z: z,
    "relu": torch.relu,
    "relu_squared": lambda z: torch.relu(z).square(),
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "swiglu": lambda z: functional.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "geglu": lambda z: functional.gelu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
}


def _pairs(dest_row_TK: Tensor):
    """(token, choice, row) of every pair that has a row."""
    for t, rows in enumerate(dest_row_TK.tolist()):
        for k, row in enumerate(rows):
            if row >= 0:
                yield t, k, row


def dispatch(x_TM: Tensor, dest_row_TK: Tensor, src_pair_R: Tensor) -> Tensor:
    """Each token in the rows of its pairs; unused rows zero."""
    rows_RM = x_TM.new_zeros(src_pair_R.shape[0], x_TM.shape[1])
    for t, _, row in _pairs(dest_row_TK):
        rows_RM[row] = x_TM[t]
    return rows_RM


def combine(
    rows_RM: Tensor,
    dest_row_TK: Tensor,
    weight_TK: Tensor,
    bias_EM: Tensor | None = None,
    expert_TK: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's rows, each with the bias of its expert."""
    y_TM = rows_RM.new_zeros(dest_row_TK.shape[0], rows_RM.shape[1])
    for t, k, row in _pairs(dest_row_TK):
        bias = 0 if bias_EM is None else bias_EM[expert_TK[t, k]]
        y_TM[t] += weight_TK[t, k] * (rows_RM[row] + bias)
    return y_TM


def assign_slots(expert_TK: Tensor, num_experts: int, priority_T: Tensor | None):
    """(slots, counts by choice and expert), as lists: all first choices go before the second."""
    T, K = expert_TK.shape
    order = list(range(T))
    if priority_T is not None:
        order.sort(key=lambda t: -priority_T[t].item())  # Python's sort is stable
    slot_TK, seen_E = [[-1] * K for _ in order], [0] * num_experts
    count_KE = [[0] * num_experts for _ in range(K)]
    for k in range(K):
        for t in order:
            expert = int(expert_TK[t, k])
            if expert >= 0:
                slot_TK[t][k] = seen_E[expert]
                seen_E[expert] += 1
                count_KE[k][expert] += 1
    return slot_TK, count_KE


def assign_rows(expert_TK, position_TK, gate_TK, num_experts, *, capacity, padded, normalize):
    """(dest_row_TK, src_pair_R, topk_weight_TK, num_kept_per_expert_E); weights have a gradient."""
    T, K = expert_TK.shape
    num_kept_E = [0] * num_experts
    for expert, position in zip(expert_TK.flatten(), position_TK.flatten(), strict=True):
        if position >= 0 and (capacity is None or position < capacity):
            num_kept_E[expert] += 1
    num_rows = num_experts * capacity if padded else T * K
    dest_row_TK = torch.full((T, K), -1, dtype=torch.int32)
    src_pair_R = torch.full((num_rows,), -1, dtype=torch.int32)
    weights = []
    for t in range(T):
        kept = [p >= 0 and (capacity is None or p < capacity) for p in position_TK[t].tolist()]
        total = sum(gate_TK[t, k] for k in range(K) if kept[k])
        eps = torch.finfo(torch.float32).eps
        for k in range(K):
            if not kept[k]:
                weights.append(gate_TK.new_zeros(()))
                continue
            expert = int(expert_TK[t, k])
            first = expert * capacity if padded else sum(num_kept_E[:expert])
            row = first + int(position_TK[t, k])
            dest_row_TK[t, k], src_pair_R[row] = row, t * K + k
            divisor = 1.0 if not normalize else total if total >= eps else eps
            weights.append(gate_TK[t, k] / divisor)
    weight_TK = torch.stack(weights).view(T, K) if weights else gate_TK.new_zeros(T, K)
    return dest_row_TK, src_pair_R, weight_TK, torch.tensor(num_kept_E, dtype=torch.int32)


def bias_act(h: Tensor, bias: Tensor | None, *, activation: str, offsets: Tensor | None) -> Tensor:
    """activation(h + bias) of each expert's rows, differentiable; rows of nobody zero."""
    function = ACTIVATIONS[activation]
    if offsets is None:
        return function(h if bias is None else h + bias[:, None])
    ends = [0, *offsets.tolist()]
    parts = [h[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    if bias is not None:
        parts = [part + b for part, b in zip(parts, bias, strict=True)]
    done = [function(part) for part in parts]
    return torch.cat([*done, h.new_zeros(len(h) - ends[-1], done[0].shape[1])])


def bias_act_bwd(dy: Tensor, h: Tensor, bias: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`bias_act`, (0,) of no bias."""
    leaves = [x.clone().requires_grad_() for x in (h, bias) if x is not None]
    y = bias_act(leaves[0], None if bias is None else leaves[1], **options)
    used = y.requires_grad
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True) if used else [None] * len(leaves)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return (*grads, h.new_empty(0))[:2]


def rows_product(rows_RA: Tensor, weight_eAB: Tensor, ends: list[int]) -> Tensor:
    """Each expert's rows times its weight; rows of nobody zero."""
    out_RB = rows_RA.new_zeros(rows_RA.shape[0], weight_eAB.shape[2])
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        out_RB[begin:end] = rows_RA[begin:end] @ weight_eAB[expert]
    return out_RB


def weight_gradient(d_RA: Tensor, rows_RB: Tensor, ends: list[int]) -> Tensor:
    """``d.T @ rows`` over each expert's rows."""
    spans = zip([0, *ends], ends, strict=False)
    return torch.stack([d_RA[begin:end].t() @ rows_RB[begin:end] for begin, end in spans])


def values_of_bytes(dtype: torch.dtype) -> list[float]:
    """The non-negative finite numbers of an 8-bit float, by their byte, from its limits."""
    limits = torch.finfo(dtype)
    steps, tiny = round(1 / limits.eps), limits.tiny
    values = []
    for byte in range(0x80):
        exponent, fraction = byte // steps, byte % steps / steps
        values.append(((exponent > 0) + fraction) * tiny * 2.0 ** (max(exponent, 1) - 1))
    return [value for value in values if value <= limits.max]


def encode_rows(rows_RM: Tensor, dtype: torch.dtype) -> tuple[list[list[int]], Tensor]:
    """Bytes of the values and of the scales of finite rows in an 8-bit format, and what arrives.

    A block takes the smallest power of two, at least 2^-126, for which its largest magnitude
    is within the format's range; each value the nearest number, of two as near the even byte.
    """
    table = values_of_bytes(dtype)
    wire, arrived_RM = [], rows_RM.clone().double()
    for r, row in enumerate(rows_RM.double().tolist()):
        values, scales = [], []
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            exponent = -126
            while max(abs(x) for x in block) > table[-1] * 2.0**exponent:
                exponent += 1
            scales.append(exponent + 127)
            for m, x in enumerate(block, start):
                sign, wanted = torch.tensor(x).signbit().item(), abs(x) * 2.0**-exponent
                byte = min(range(len(table)), key=lambda i: (abs(table[i] - wanted), i % 2))
                values.append(byte + 0x80 * sign)
                arrived_RM[r, m] = (-1) ** sign * table[byte] * 2.0**exponent
        padding = -(len(values) + len(scales)) % 4
        wire.append(values + scales + [0] * padding)
    return wire, arrived_RM


@dataclass
class Gating:
    """A routing by :func:`gating`."""

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
    num_tokens: int | None = None,
) -> Gating:
    """Route T tokens to E experts, and null experts behind those, one choice after the other.

    For softmax scores, K <= 2 and no other options it is the gating of fairseq's ``moe`` branch.
    ``bias_E`` is on the selection. ``seed``: of draws of policies; the generator is left alone.
    ``num_tokens``: by which the capacity is computed, if not T.
    """
    (tokens, outputs), experts, top_k = logits_TE.shape, config.num_experts, config.top_k
    sigmoid = config.score_function == "sigmoid"
    score_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(1)
    prob_TE = score_TE / score_TE.sum(1, keepdim=True) if sigmoid else score_TE
    key_TE = (score_TE if sigmoid else logits_TE).detach() + (0 if bias_E is None else bias_E)
    if config.num_expert_groups > 1:
        key_TE = _of_best_groups(key_TE, config)
    later_TE, drawn_T, uniform_TK = _draws(config, training, key_TE, prob_TE, seed)
    live = [t for t in range(tokens) if pad_T is None or not pad_T[t]]
    capacity = capacity_of(config, tokens if num_tokens is None else num_tokens, training)

    order = []  # of all outputs, by token
    for key, later in zip(key_TE.tolist(), later_TE.tolist(), strict=True):
        first = max(range(outputs), key=lambda e: key[e])
        rest = [e for e in range(outputs) if e != first]
        order.append([first, *sorted(rest, key=lambda e: -later[e])])

    # Meta's rule; other scores may be small
    numbers = torch.finfo(score_TE.dtype)
    least = numbers.tiny if sigmoid or config.null_experts else numbers.eps

    def total(pairs):
        """[T], sum of the scores of these pairs of each token."""
        t, e = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
        sums_T = score_TE.new_zeros(tokens).index_add(0, t, score_TE[t, e])
        return sums_T.clamp(min=least)

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

    def in_turn(pairs, value_TE=score_TE):
        """(token, expert, choice) in the order in which they take slots; sorting is stable."""
        if config.batch_prioritized:
            return sorted(pairs, key=lambda p: -score_TE[p[0], order[p[0]][0]])
        if drawn_T is not None:
            return sorted(pairs, key=lambda p: -drawn_T[p[0]])
        if config.drop_policy == "probability":
            return sorted(pairs, key=lambda p: -value_TE[p[0], p[1]])
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
        for t, e, k in in_turn([(t, order[t][r], trying[t]) for t in sorted(trying)], gate_TE):
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
        _metrics(prob_TE.detach(), shown, num_routed_K, full_K, experts, len(place)),
    )


def _of_best_groups(key_TE, config):
    """Keys, -inf for experts outside each token's best groups."""
    size, found = config.num_experts // config.num_expert_groups, key_TE.clone()
    for key, row in zip(key_TE.tolist(), found, strict=True):
        values = key if config.score_function == "sigmoid" else [math.exp(k) for k in key]
        groups = [range(first, first + size) for first in range(0, len(key), size)]
        largest = {"max": 1, "top2": 2}[config.group_score]
        score = [sum(sorted((values[e] for e in g), reverse=True)[:largest]) for g in groups]
        best = sorted(range(len(groups)), key=lambda g: -score[g])[: config.top_groups]  # noqa: B023
        for number, group in enumerate(groups):
            if number not in best:
                row[list(group)] = -math.inf
    return found


def _draws(config, training, key_TE, prob_TE, seed):
    """Keys of choices after the first; draws of tokens; draws of pairs."""
    drawn_T = uniform_TK = None
    with torch.random.fork_rng([]):
        torch.manual_seed(seed or 0)
        several = training and config.top_k > 1
        if several and config.second_expert_policy == "sampling":
            key_TE = prob_TE.detach().log() - torch.empty_like(key_TE).exponential_().log()
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


def _metrics(prob_TE, chosen, num_routed_K, full_K, experts, kept):
    tokens = max(len(prob_TE), 1)
    routed = sum(num_routed_K)
    metrics = {"moe_drop": 100 * (routed - kept) / routed if routed else 0.0}
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


def layer(x_TM: Tensor, gate_EM: Tensor, expert, config, training=True, **options):
    """(y_TM, gating) of a layer with a linear router; ``expert(x_M, e)`` computes one token."""
    routed = gating(x_TM @ gate_EM.t(), config, training, **options)
    kept = {(t, e) for (t, _), (e, _) in routed.place.items()}
    rows = []
    for t, x_M in enumerate(x_TM):
        y_M = torch.zeros_like(x_M)
        for e in range(config.num_experts):
            if (t, e) in kept:
                y_M = y_M + routed.weight_TE[t, e] * expert(x_M, e)
        rows.append(y_M)
    return torch.stack(rows), routed
