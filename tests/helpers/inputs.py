"""Inputs that several tests need, and what lies in fresh memory."""

import os
from pathlib import Path

import torch
from torch import Tensor


class RunsCode:
    """Unpickling this would create a file: the classic attack on pickles."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def poison_fresh_memory(monkeypatch) -> None:
    """Fresh memory is NaN (or a large integer), so that an element nobody writes shows."""

    def poisoned(original):
        def empty(*args, **given):
            made = original(*args, **given)
            if made.is_floating_point():
                return made.fill_(float("nan"))
            whole = 1 if made.dtype == torch.bool else torch.iinfo(made.dtype).max
            return made.fill_(min(0x5A5A5A5A, whole))

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def random_rows(T: int, K: int, E: int, C: int, kind: str) -> tuple[Tensor, Tensor]:
    """(row_TK, pair_R) of T tokens routed to K of E experts with C rows each; others are dropped.

    ``kind``: ``spread`` = random experts, ``one`` = all on expert 1, ``dropped`` = nothing routed.
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


def expert_rows(shape, ends, dtype, device, halves=1):
    """(h, bias, dy, offsets) of an activation whose output has this shape; gated has two halves.

    ``ends``: None for padded rows, else where each expert's end; what lies behind the last is NaN.
    """
    generator = torch.Generator().manual_seed(shape[0])
    num_experts = shape[0] if ends is None else len(ends)
    *rows, units = shape
    h = 2 * torch.randn(*rows, halves * units, generator=generator)
    dy = 2 * torch.randn(shape, generator=generator)
    bias = torch.randn(num_experts, halves * units, generator=generator)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    if ends is not None:
        h[ends[-1] :] = dy[ends[-1] :] = float("nan")
    return (*(x.to(dtype).to(device) for x in (h, bias, dy)), offsets)


def decoded(room, wire: Tensor, wire_format: str, model_dim: int, dtype: torch.dtype) -> Tensor:
    """What a room (operators or a backend) makes of rows on the wire."""
    out = torch.empty(len(wire), model_dim, dtype=dtype, device=wire.device)
    return room.decode_rows(wire, wire_format, out)
