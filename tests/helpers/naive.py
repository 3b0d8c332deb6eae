"""Operators as loops over tokens that follow their definitions word by word; slow on purpose."""

import torch
from torch import Tensor
from torch.nn import functional

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


def wire_values(mantissa: int, bias: int, infinities: bool) -> list[float]:
    """The non-negative finite numbers of an 8-bit format, by their byte.

    ``infinities``: the largest exponent is theirs and NaN's (e5m2); else 0x7F alone is NaN (e4m3).
    """
    values = []
    for byte in range(0x80 - ((1 << mantissa) if infinities else 1)):
        exponent, fraction = byte >> mantissa, byte % (1 << mantissa) / (1 << mantissa)
        whole = 1 if exponent else 0
        values.append((whole + fraction) * 2.0 ** (max(exponent, 1) - bias))
    return values


WIRE_VALUES = {"e4m3": wire_values(3, 7, False), "e5m2": wire_values(2, 15, True)}


def encode_rows(rows_RM: Tensor, wire_format: str) -> tuple[list[list[int]], Tensor]:
    """Bytes of the values and of the scales of finite rows in an 8-bit format, and what arrives.

    A block of 128 takes the smallest power of two, at least 2^-126, for which its largest magnitude
    is within the format's range; each value the nearest number, of two as near the even byte.
    """
    table = WIRE_VALUES[wire_format]
    wire, arrived_RM = [], rows_RM.clone().double()
    for r, row in enumerate(rows_RM.double().tolist()):
        values, scales = [], []
        for start in range(0, len(row), 128):
            block = row[start : start + 128]
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
