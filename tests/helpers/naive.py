"""Operators as loops over tokens that follow their definitions word by word.

Any device and dtype; slow on purpose. What the tuned backends compute is compared with these.
"""

import torch
from torch import Tensor


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


def wire_values(mantissa: int, bias: int, infinities: bool) -> list[float]:
    """The non-negative finite numbers of an 8-bit format, by their byte.

    Args:
        mantissa: bits of it.
        bias: of the exponent.
        infinities: the largest exponent is theirs and NaN's (e5m2); else 0x7F alone is NaN (e4m3).
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
