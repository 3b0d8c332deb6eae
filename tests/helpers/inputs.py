"""Inputs that several tests need."""

import torch
from torch import Tensor


def random_rows(T: int, K: int, E: int, C: int, kind: str) -> tuple[Tensor, Tensor]:
    """(row_TK, pair_R) of T tokens routed to K of E experts with C rows each, R = E * C.

    ``kind``: ``spread`` = random experts, ``one`` = all tokens on expert 1 (K rows each),
    ``dropped`` = nothing routed. Pairs beyond an expert's C rows are dropped. Built by a loop.
    """
    generator = torch.Generator().manual_seed(T * 31 + K)
    free = {x: [x * C + int(s) for s in torch.randperm(C, generator=generator)] for x in range(E)}
    row_TK = torch.full((T, K), -1, dtype=torch.int32)
    pair_R = torch.full((E * C,), -1, dtype=torch.int32)
    if kind == "dropped":
        return row_TK, pair_R
    for t in range(T):
        order = torch.randperm(E, generator=generator)
        for k in range(K):
            expert = 1 if kind == "one" else int(order[k])
            if free[expert]:
                row = free[expert].pop()
                row_TK[t, k], pair_R[row] = row, t * K + k
    return row_TK, pair_R
