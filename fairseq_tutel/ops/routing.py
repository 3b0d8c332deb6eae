"""Operators of the router: gating, slots, inverse row map.

Legend: T tokens, E experts, K top-k, R rows.
"""

from typing import Optional

import torch
from torch import Tensor

from .backend import implementation


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and {num_experts} experts, got {top_k}")


@torch.library.custom_op("fairseq_tutel::topk_gating", mutates_args=())
def _topk_gating(
    logits: Tensor, top_k: int, noise: Optional[Tensor], pad: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    impl = implementation(logits)
    return impl.topk_gating_fwd(logits, top_k, noise_TE=noise, pad_T=pad)


@_topk_gating.register_fake
def _(logits, top_k, noise, pad):
    T, E = logits.shape
    expert_TK = logits.new_empty((T, top_k), dtype=torch.int32)
    choice_TK = logits.new_empty((0 if pad is None else T, top_k), dtype=torch.int32)
    return (
        expert_TK,
        logits.new_empty((T, top_k)),
        logits.new_empty((E,)),
        logits.new_empty(()),
        logits.new_empty((T,)),
        choice_TK,
    )


@torch.library.custom_op("fairseq_tutel::topk_gating_bwd", mutates_args=())
def _topk_gating_bwd(
    d_gate: Tensor,
    d_prob_sum: Tensor,
    d_lse: Tensor,
    logits: Tensor,
    lse: Tensor,
    choice: Tensor,
) -> Tensor:
    impl = implementation(logits)
    return impl.topk_gating_bwd(d_gate, d_prob_sum, d_lse, logits, lse, choice)


@_topk_gating_bwd.register_fake
def _(d_gate, d_prob_sum, d_lse, logits, lse, choice):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _gating_setup(ctx, inputs, output):
    logits, _, _, pad = inputs
    expert, _, _, _, lse, choice = output
    ctx.mark_non_differentiable(expert, output[3], choice)
    ctx.save_for_backward(logits, lse, expert if pad is None else choice)


def _gating_backward(ctx, d_expert, d_gate, d_prob_sum, d_entropy, d_lse, d_choice):
    logits, lse, choice = ctx.saved_tensors
    d_logits = _topk_gating_bwd(d_gate, d_prob_sum, d_lse, logits, lse, choice)
    return d_logits, None, None, None


_topk_gating.register_autograd(_gating_backward, setup_context=_gating_setup)


def topk_gating(
    logits_TE: Tensor, top_k: int, *, noise_TE: Tensor | None = None, pad_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Softmax, top-k and the sums that the losses and metrics need, in one pass.

    The first choice is the most probable expert (lowest index wins ties); choice j > 1 is the
    largest of logits + noise among the experts not yet taken. GShard, arXiv 2006.16668.

    Args:
        logits_TE: (T, E) fp32 (fp64 on the torch backend).
        top_k: experts per token, 1 <= top_k <= E.
        noise_TE: (T, E) in the dtype of the logits, or None.
        pad_T: (T,) bool, True for padding, or None.

    Returns:
        expert_TK: (T, K) int32, -1 in padded rows.
        gate_TK: (T, K) softmax at the chosen experts, not renormalised; differentiable.
        prob_sum_E: (E,) sum of the softmax over all T rows, padding included; differentiable.
        entropy_sum: scalar, sum over rows of -sum p ln p; no gradient.
        lse_T: (T,) logsumexp of the logits; differentiable.

    Raises:
        ValueError: top_k out of range or a tensor of a wrong shape.
    """
    if logits_TE.dim() != 2:
        raise ValueError(f"logits must be (tokens, experts), got {tuple(logits_TE.shape)}")
    _check_top_k(top_k, logits_TE.shape[1])
    if noise_TE is not None and noise_TE.shape != logits_TE.shape:
        raise ValueError(
            f"noise {tuple(noise_TE.shape)} must have the shape of the logits "
            f"{tuple(logits_TE.shape)}"
        )
    if pad_T is not None and pad_T.shape != logits_TE.shape[:1]:
        raise ValueError(f"pad {tuple(pad_T.shape)} must be ({logits_TE.shape[0]},)")
    expert, gate, prob_sum, entropy_sum, lse, _ = _topk_gating(logits_TE, top_k, noise_TE, pad_T)
    return expert, gate, prob_sum, entropy_sum, lse


@torch.library.custom_op("fairseq_tutel::assign_slots", mutates_args=())
def _assign_slots(
    expert: Tensor, num_experts: int, priority: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    impl = implementation(expert)
    return impl.assign_slots(expert, num_experts, priority_T=priority)


@_assign_slots.register_fake
def _(expert, num_experts, priority):
    slot_TK = torch.empty_like(expert, memory_format=torch.contiguous_format)
    return slot_TK, expert.new_empty((expert.shape[1], num_experts))


def assign_slots(
    expert_TK: Tensor, num_experts: int, *, priority_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position of each (token, choice) within its expert; deterministic.

    All first choices are counted before all second ones and so on, each in token order or, with
    priorities, by descending priority (ties in token order).

    Args:
        expert_TK: (T, K) int32, -1 = not routed.
        num_experts: E.
        priority_T: (T,) float, or None.

    Returns:
        slot_TK: (T, K) int32, -1 where not routed.
        count_KE: (K, E) int32, pairs per choice and expert.

    Raises:
        ValueError: wrong shape or dtype.
    """
    if expert_TK.dim() != 2 or expert_TK.dtype != torch.int32:
        raise ValueError(
            f"expert must be (tokens, top_k) int32, got {tuple(expert_TK.shape)} {expert_TK.dtype}"
        )
    if priority_T is not None:
        if priority_T.shape != expert_TK.shape[:1]:
            raise ValueError(f"priority {tuple(priority_T.shape)} must be ({expert_TK.shape[0]},)")
        priority_T = priority_T.detach()
    return _assign_slots(expert_TK, num_experts, priority_T)


@torch.library.custom_op("fairseq_tutel::invert_rows", mutates_args=())
def _invert_rows(row: Tensor, num_rows: int) -> Tensor:
    return implementation(row).invert_rows(row, num_rows)


@_invert_rows.register_fake
def _(row, num_rows):
    return row.new_empty((num_rows,))


def invert_rows(row_TK: Tensor, num_rows: int) -> Tensor:
    """Which pair sits in each row: (num_rows,) int32 of t * K + k, -1 where unused.

    Args:
        row_TK: (T, K) int32, -1 = dropped; every row at most once, all below num_rows.
        num_rows: R.

    Raises:
        ValueError: wrong shape or dtype.
    """
    if row_TK.dim() != 2 or row_TK.dtype != torch.int32:
        raise ValueError(
            f"row must be (tokens, top_k) int32, got {tuple(row_TK.shape)} {row_TK.dtype}"
        )
    return _invert_rows(row_TK, num_rows)


@torch.library.custom_op("fairseq_tutel::fast_cumsum_sub_one", mutates_args=())
def _fast_cumsum_sub_one(mask: Tensor) -> Tensor:
    return implementation(mask).fast_cumsum_sub_one(mask)


@_fast_cumsum_sub_one.register_fake
def _(mask):
    return mask.new_empty(mask.shape, dtype=torch.int32)


def fast_cumsum_sub_one(mask_TE: Tensor) -> Tensor:
    """Cumulative sum over dim 0 minus one, (T, E) int32; Tutel's function of the same name.

    Args:
        mask_TE: (T, E) integer or bool.

    Raises:
        ValueError: not two-dimensional, or a floating-point mask.
    """
    if mask_TE.dim() != 2 or mask_TE.is_floating_point() or mask_TE.is_complex():
        raise ValueError(
            f"mask must be (tokens, experts) of integers or bool, got "
            f"{tuple(mask_TE.shape)} {mask_TE.dtype}"
        )
    return _fast_cumsum_sub_one(mask_TE)
