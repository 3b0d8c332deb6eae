"""The shortest way of a few tokens through a layer, without gradients: a step of generation.

The numbers are those of the other files of this folder, bit for bit: the same products of the same
rows in the same order. What those spend on tensors of a few indices (counts, slots, inverse maps)
is here done by Python, which reads a handful of indices in less time than torch begins an operator.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._expert_blocks import Block, Blocks, by_plane
from .activation import acc_dtype
from .dispatch import combine_fwd
from .expert_ffn import run_blocks
from .gating import _select


class FewRows(NamedTuple):
    """The rows of a few tokens' pairs, those of an expert after those of the one before."""

    token_R: Tensor  # int64, the token of each row
    dest_row_TK: Tensor  # int32, the row of each pair; -1 where it has none
    spans: list[tuple[int, int, int]]  # (expert, its first row, the end of its rows), used ones

    def combine(self, out_RM: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's rows, (T, M)."""
        return combine_fwd(out_RM, self.dest_row_TK, weight_TK)


def choose_few(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The K best experts of each token and their probabilities, as ``topk_gating_fwd`` has them:
    (T, K) int64 and (T, K) in the dtype of the logits, at least fp32.
    """
    score_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    score_TE = score_TE.clamp(min=torch.finfo(score_TE.dtype).min)
    prob_TE = (score_TE - score_TE.amax(dim=1, keepdim=True)).exp_()
    prob_TE /= prob_TE.sum(dim=1, keepdim=True)
    choice_TK = _select(score_TE, prob_TE.argmax(dim=1, keepdim=True), top_k)
    return choice_TK, prob_TE.gather(1, choice_TK)


def arrange_few(choice_TK: Tensor, pad_T: Tensor | None) -> FewRows:
    """Rows for all pairs but those of padding (bool [T], or None). The host reads the choices.

    Rows of an expert are in the order of ``assign_slots``: first choices before second ones.
    """
    pairs = [
        (expert, k, t)
        for t, (experts, pad) in enumerate(_rows_of(choice_TK, pad_T))
        for k, expert in enumerate(experts)
        if not pad
    ]
    pairs.sort()
    dest_row = [[-1] * choice_TK.shape[1] for _ in range(len(choice_TK))]
    spans: list[tuple[int, int, int]] = []
    for row, (expert, k, t) in enumerate(pairs):
        dest_row[t][k] = row
        begin = spans.pop()[1] if spans and spans[-1][0] == expert else row
        spans.append((expert, begin, row + 1))
    return FewRows(
        torch.tensor([t for _, _, t in pairs], dtype=torch.int64),
        torch.tensor(dest_row, dtype=torch.int32).view(choice_TK.shape),
        spans,
    )


def _rows_of(choice_TK, pad_T):
    choices = choice_TK.tolist()
    return zip(choices, [False] * len(choices) if pad_T is None else pad_T.tolist(), strict=True)


def expert_ffn_few(
    rows_RM: Tensor,
    spans: Sequence[tuple[int, int, int]],
    *params: Tensor | None,
    activation: str,
) -> Tensor:
    """``expert_ffn_fwd`` of the used experts alone; arguments and result as there, (R, M)."""
    hidden_dim = params[2].shape[2]
    experts, sizes = [e for e, _, _ in spans], [end - begin for _, begin, end in spans]
    acc, block = acc_dtype(rows_RM.dtype), Block(slice(0, len(rows_RM)), experts, sizes)
    to = Blocks((block,), hidden_dim, activation, (0.0, 0.0), 0, rows_RM.dtype, acc)
    out_RM = torch.empty_like(rows_RM)
    run_blocks(to, rows_RM, params, out_RM)
    return out_RM


def expert_ffn_int8(
    rows_NM: Tensor,
    w1: Tensor,
    scale1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    scale2: Tensor,
    b2: Tensor | None,
    *,
    activation: str,
) -> Tensor:
    """One expert whose weights are int8 (F, M) and (M, F) times a bf16 scale of each row, of bf16
    rows; products add up in fp32 and are rounded to bf16, all else is in fp32: fp32 (N, M).
    """
    to = Blocks((), w2.shape[1], activation, (0.0, 0.0), 0, torch.bfloat16, torch.float32)
    z = torch._weight_int8pack_mm(rows_NM.contiguous(), w1, scale1).float()
    z = z if b1 is None else z.add_(b1)
    active = to.activate([plane.contiguous() for plane in by_plane(z, w2.shape[1])])
    y = torch._weight_int8pack_mm(active, w2, scale2).float()
    return y if b2 is None else y.add_(b2)
