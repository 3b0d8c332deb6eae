"""Operator of the gating: softmax, top-k and the sums over tokens."""

from typing import Optional

import torch
from torch import Tensor

from ._operator import check_shape, operator
from .backend import implementation


def _fake_gating(logits, top_k, noise, pad, key=None, sums=True):
    T, E = logits.shape
    expert_TK = logits.new_empty((T, top_k), dtype=torch.int32)
    choice_TK = expert_TK.new_empty((0 if pad is None else T, top_k))
    shapes = ((T, top_k), *(((E,), ()) if sums else ((0,), (0,))), (T,))
    return expert_TK, *(logits.new_empty(shape) for shape in shapes), choice_TK


@operator("topk_gating", _fake_gating)
def _topk_gating(
    logits: Tensor,
    top_k: int,
    noise: Optional[Tensor],
    pad: Optional[Tensor],
    key: Optional[Tensor] = None,
    sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gating = implementation("topk_gating_fwd", logits)
    return gating(logits, top_k, noise_TE=noise, pad_T=pad, key_TE=key, sums=sums)


@operator("topk_gating_bwd", lambda *given: given[3].new_empty(given[3].shape))
def _topk_gating_bwd(
    d_gate: Optional[Tensor],
    d_prob_sum: Optional[Tensor],
    d_lse: Optional[Tensor],
    logits: Tensor,
    lse: Tensor,
    choice: Tensor,
) -> Tensor:
    return implementation("topk_gating_bwd", logits)(d_gate, d_prob_sum, d_lse, logits, lse, choice)


def _gating_setup(ctx, inputs, output):
    logits, _, _, pad, *_ = inputs
    expert, _, _, _, lse, choice = output
    ctx.mark_non_differentiable(expert, output[3], choice)
    # or the gradient of each unused output would be a tensor of zeros, filled by a kernel
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, lse, expert if pad is None else choice)


def _gating_backward(ctx, d_expert, d_gate, d_prob_sum, d_entropy, d_lse, d_choice):
    if d_gate is None and d_prob_sum is None and d_lse is None:
        return (None,) * 6
    logits, lse, choice = ctx.saved_tensors
    d_logits = _topk_gating_bwd(d_gate, d_prob_sum, d_lse, logits, lse, choice)
    return d_logits, *(None,) * 5


_topk_gating.register_autograd(_gating_backward, setup_context=_gating_setup)


def topk_gating(
    logits_TE: Tensor,
    top_k: int,
    *,
    noise_TE: Tensor | None = None,
    pad_T: Tensor | None = None,
    key_TE: Tensor | None = None,
    sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute softmax, top-k and the sums for losses and metrics in one pass.

    The first choice is the most probable expert (lowest index wins ties); choice j > 1 is the
    largest of logits + noise among the experts not yet taken. GShard, arXiv 2006.16668.

    Args:
        logits_TE: (T, E) fp32 (fp64 on the torch backend).
        top_k: experts per token, 1 <= top_k <= E.
        noise_TE: (T, E) in the dtype of the logits, or None.
        pad_T: (T,) bool, True for padding, or None.
        key_TE: (T, E) in the dtype of the logits, or None: selects the experts with the largest
            keys; everything else comes from the logits. No gradient. Not with noise.
        sums: compute the two sums (default True); else they have shape (0,).

    Returns:
        expert_TK: (T, K) int32, -1 in padded rows.
        gate_TK: (T, K) softmax at the chosen experts, not renormalised; differentiable.
        prob_sum_E: (E,) sum of the softmax over all T rows, padding included; differentiable.
        entropy_sum: scalar, sum over rows of -sum p ln p; no gradient.
        lse_T: (T,) logsumexp of the logits; differentiable.
    """
    if logits_TE.dim() != 2:
        raise ValueError(f"logits must be (tokens, experts), got {tuple(logits_TE.shape)}")
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k must be between 1 and {logits_TE.shape[1]} experts, got {top_k}")
    check_shape("noise", noise_TE, logits_TE.shape)
    check_shape("key", key_TE, logits_TE.shape)
    check_shape("pad", pad_T, logits_TE.shape[:1])
    if noise_TE is not None and key_TE is not None:
        raise ValueError("noise is added to the logits, and a key takes their place: give one")
    key_TE = None if key_TE is None else key_TE.detach()
    expert, gate, prob_sum, entropy_sum, lse, _ = _topk_gating(
        logits_TE, top_k, noise_TE, pad_T, key_TE, sums
    )
    return expert, gate, prob_sum, entropy_sum, lse


@operator("scaled_dot", lambda a, b, scale: (a.new_empty(()), a.new_empty(a.shape)))
def _scaled_dot(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return implementation("scaled_dot_fwd", a)(a, b, scale)


def _dot_setup(ctx, inputs, output):
    weight = output[1]
    ctx.mark_non_differentiable(weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight)


def _dot_backward(ctx, d_dot, d_weight):
    return None if d_dot is None else d_dot * ctx.saved_tensors[0], None, None


_scaled_dot.register_autograd(_dot_backward, setup_context=_dot_setup)


def scaled_dot(a_E: Tensor, b_E: Tensor, scale: float) -> Tensor:
    """Return ``scale * <a, b>``, the form of balance losses, by one launch each way.

    ``a_E`` is fp32 (fp64 on the torch backend) and differentiable, ``b_E`` int32 or int64.
    """
    check_shape("b", b_E, a_E.shape)
    return _scaled_dot(a_E, b_E, scale)[0]
