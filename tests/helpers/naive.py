"""Operators as loops over tokens that follow their definitions word by word.

Any device and dtype; slow on purpose. What the tuned backends compute is compared with these.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_accurate": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_fast": lambda z: F.gelu(z, approximate="tanh"),
    "linear": lambda z: z,
    "relu": F.relu,
    "relu_squared": lambda z: F.relu(z) ** 2,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def topk_gating(logits_TE: Tensor, top_k: int, noise_TE=None, pad_T=None) -> tuple[Tensor, ...]:
    """(expert_TK, gate_TK, prob_sum_E, entropy_sum, lse_T, choice_TK) by the standard library."""
    (T, E), chosen_TK, gate_TK, lse_T = logits_TE.shape, [], [], []
    prob_sum_E, entropy_sum = [0.0] * E, 0.0
    for t, row in enumerate(logits_TE.tolist()):
        total = sum(math.exp(value) for value in row)
        prob = [math.exp(value) / total for value in row]
        extra = [0.0] * E if noise_TE is None else noise_TE[t].tolist()
        score = [a + b for a, b in zip(row, extra, strict=True)]
        chosen = [max(range(E), key=lambda e: prob[e])]
        while len(chosen) < top_k:
            free = [e for e in range(E) if e not in chosen]
            chosen.append(max(free, key=lambda e: score[e]))
        chosen_TK.append(chosen)
        gate_TK.append([prob[e] for e in chosen])
        prob_sum_E = [a + b for a, b in zip(prob_sum_E, prob, strict=True)]
        entropy_sum -= sum(p * math.log(p) for p in prob)
        lse_T.append(math.log(total))
    device, wide = logits_TE.device, torch.float64
    choice_TK = torch.tensor(chosen_TK, dtype=torch.int32, device=device).view(T, top_k)
    sums = (torch.tensor(x, dtype=wide, device=device) for x in (prob_sum_E, entropy_sum, lse_T))
    gate_TK = torch.tensor(gate_TK, dtype=wide, device=device).view(T, top_k)
    if pad_T is None:
        return choice_TK, gate_TK, *sums, choice_TK[:0]
    return choice_TK.where(~pad_T[:, None], -1), gate_TK, *sums, choice_TK


def assign_slots(expert_TK: Tensor, num_experts: int, priority_T=None) -> tuple[Tensor, Tensor]:
    """(position_in_expert_TK, num_routed_KE): first choices before second ones, in order."""
    T, K = expert_TK.shape
    order = list(range(T))
    if priority_T is not None:
        order.sort(key=lambda t: -priority_T[t].item())  # Python's sort is stable
    position_TK = torch.full((T, K), -1, dtype=torch.int32)
    seen_E = [0] * num_experts
    num_routed_KE = torch.zeros(K, num_experts, dtype=torch.int32)
    for k in range(K):
        for t in order:
            expert = int(expert_TK[t, k])
            if expert >= 0:
                position_TK[t, k] = seen_E[expert]
                seen_E[expert] += 1
                num_routed_KE[k, expert] += 1
    return position_TK.to(expert_TK.device), num_routed_KE.to(expert_TK.device)


def bias_act(h: Tensor, bias_eF: Tensor, activation: str, offsets_e=None) -> Tensor:
    """activation(h + bias) expert by expert; rows of nobody zero."""
    function = ACTIVATIONS[activation]
    if offsets_e is None:
        return torch.stack([function(x + b) for x, b in zip(h, bias_eF, strict=True)])
    ends = offsets_e.tolist()
    spans = zip([0, *ends[:-1]], ends, bias_eF, strict=True)
    parts = [function(h[begin:end] + b) for begin, end, b in spans]
    return torch.cat([*parts, torch.zeros_like(h[ends[-1] :])])


def bias_act_bwd(dy: Tensor, h: Tensor, bias_eF: Tensor, activation: str, offsets_e=None):
    """Gradients of :func:`bias_act` by autograd: of h and of the bias."""
    leaves = [x.detach().clone().requires_grad_() for x in (h, bias_eF)]
    return torch.autograd.grad(bias_act(*leaves, activation, offsets_e), leaves, dy)


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


def combine(rows_RM: Tensor, dest_row_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows."""
    y_TM = rows_RM.new_zeros(dest_row_TK.shape[0], rows_RM.shape[1])
    for t, k, row in _pairs(dest_row_TK):
        y_TM[t] += weight_TK[t, k] * rows_RM[row]
    return y_TM


def combine_bwd(
    dy_TM: Tensor, rows_RM: Tensor, dest_row_TK: Tensor, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`combine`: of the rows and of the weights."""
    d_rows_RM, d_weight_TK = torch.zeros_like(rows_RM), torch.zeros_like(weight_TK)
    for t, k, row in _pairs(dest_row_TK):
        d_rows_RM[row] = weight_TK[t, k] * dy_TM[t]
        d_weight_TK[t, k] = dy_TM[t] @ rows_RM[row]
    return d_rows_RM, d_weight_TK


def assign_rows(expert_TK, position_TK, gate_TK, num_experts, *, capacity, padded, normalize):
    """(dest_row_TK, src_pair_R, topk_weight_TK, num_kept_per_expert_E); the weight carries the
    gradient of the gate values.
    """
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


def rows_product(rows_RA: Tensor, weight_eAB: Tensor, ends: list[int]) -> Tensor:
    """Each expert's rows times its weight; rows of nobody zero."""
    out_RB = rows_RA.new_zeros(rows_RA.shape[0], weight_eAB.shape[2])
    begin = 0
    for expert, end in enumerate(ends):
        out_RB[begin:end] = rows_RA[begin:end] @ weight_eAB[expert]
        begin = end
    return out_RB


def weight_gradient(d_RA: Tensor, rows_RB: Tensor, ends: list[int]) -> Tensor:
    """``d.T @ rows`` over each expert's rows."""
    out_eAB = d_RA.new_zeros(len(ends), d_RA.shape[1], rows_RB.shape[1])
    begin = 0
    for expert, end in enumerate(ends):
        out_eAB[expert] = d_RA[begin:end].t() @ rows_RB[begin:end]
        begin = end
    return out_eAB
