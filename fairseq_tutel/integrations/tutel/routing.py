"""Tutel's routing: tokens to slots of experts, and rows by slots; a plan is a ``Critical``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...distributed.world import gather_integers
from ...moe import losses
from . import net


class Critical(NamedTuple):
    """Slots of all choices; each list has K tensors [T]."""

    num_global_experts: int
    indices: Sequence[Tensor]  # int32, the expert; below 0: none
    locations: Sequence[Tensor]  # int32, the slot; C and above: dropped
    gates: Sequence[Tensor]  # weights, differentiable
    capacity: int
    dispatch_count: Tensor  # int32 [E], choices of each expert before dropping

    def maps(self) -> tuple[Tensor, Tensor]:
        """Return ``dest_row_TK`` and ``src_pair_R`` (:mod:`fairseq_tutel.ops`) of E * C rows."""
        expert_TK, slot_TK = torch.stack([*self.indices], 1), torch.stack([*self.locations], 1)
        kept_TK = (expert_TK >= 0) & (slot_TK < self.capacity)
        dest_TK = torch.where(kept_TK, expert_TK * self.capacity + slot_TK, -1).to(torch.int32)
        return dest_TK, ops.source_of_rows(dest_TK, self.num_global_experts * self.capacity)

    def weights(self) -> Tensor:
        """Return the weights, at least fp32 [T, K]."""
        gate_TK = torch.stack([*self.gates], 1)
        return gate_TK.to(torch.promote_types(gate_TK.dtype, torch.float32))


def largest(value: int, group=None) -> int:
    """Return the largest value of any rank. Collective."""
    return value if net.get_world_size(group) == 1 else max(gather_integers([value], group))[0]


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """Return the cumulative sum over the first dimension of a matrix, minus one."""
    if data.dim() != 2 or dim != 0:
        raise ValueError(f"data must be a matrix and dim 0, not {tuple(data.shape)} and dim={dim}")
    return data.cumsum(0) - 1


def gshard_loss(scores: Tensor, top_ids: Tensor) -> Tensor:
    """Return GShard's balance loss, ``E * sum_e mean_t(p_te) * mean_t(first choice is e)``."""
    first_E = top_ids[:, 0].bincount(minlength=scores.shape[1])
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return losses.balance_loss(scores.sum(0, dtype=dtype), first_E, len(scores))


def load_importance_loss(_, top_ids: Tensor, *, clean_TE, noisy_TE, noise_std: float) -> Tensor:
    """Return Tutel's form of the loss: probabilities beside the K-th logit, sample variances."""
    if noise_std <= 0:
        raise ValueError("is_gshard_loss=False needs a gate_noise above 0")
    last_T, experts = noisy_TE.gather(1, top_ids[:, -1:])[:, 0], clean_TE.shape[1]
    loss = losses.load_importance_loss(clean_TE, clean_TE, last_T, noise_std)
    return loss * (experts / max(experts - 1, 1))


def extract_critical(
    scores: Tensor, top_k: int, loss_fn: Callable[[Tensor, Tensor], Any] | None = gshard_loss,
    capacity_factor=1.0, batch_prioritized_routing=False, normalize_gate=True, alignment=1,
    group=None, inequivalent_tokens=False, num_tokens: int | None = None,
) -> tuple[Critical, Any]:  # fmt: skip
    """Return the slots of the K best experts of each token, and ``loss_fn(scores, top_ids)``.

    ``num_tokens`` is the T of the largest rank (default None: that of this rank, or found).
    """
    tokens, experts = scores.shape
    top_k = min(top_k, experts)
    top_ids = scores.topk(top_k, dim=1).indices
    expert_TK, gate_TK = top_ids.int(), scores.gather(1, top_ids)
    priority_T = scores.amax(1) if batch_prioritized_routing else None
    slot_TK, count_KE = ops.assign_slots(expert_TK, experts, priority_T=priority_T)
    if normalize_gate and top_k > 1:
        gate_TK = gate_TK / gate_TK.sum(1, keepdim=True).clamp(torch.finfo(gate_TK.dtype).eps)
    if num_tokens is None:
        num_tokens = largest(tokens, group) if inequivalent_tokens else tokens
    capacity = top_k * int(abs(capacity_factor) * -(-num_tokens // experts))
    count_E = count_KE.sum(0, dtype=torch.int32)
    if capacity_factor <= 0:
        needed = largest(int(count_E.max()), group)
        capacity = min(needed, capacity) if capacity_factor else needed
    capacity = -(-max(capacity, 1) // alignment) * alignment
    columns = expert_TK.unbind(1), slot_TK.unbind(1), gate_TK.unbind(1)
    loss = None if loss_fn is None else loss_fn(scores, top_ids)
    return Critical(experts, *columns, capacity, count_E), loss


def prescored(data: Tensor, weight_TK: Tensor) -> Tensor:
    """Return each token once per choice, times its weight [T * K, M]."""
    return (data[:, None] * weight_TK[..., None]).to(data.dtype).flatten(0, 1)


def fast_encode(data: Tensor, crit: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Copy tokens [T, M] to their slots [E, C, M]; times their weights unless ``is_postscore``."""
    crit = Critical(*crit)
    dest_TK, src_R = crit.maps()
    if not is_postscore:
        data, dest_TK = prescored(data, crit.weights()), dest_TK.reshape(-1, 1)
    return ops.dispatch(data, dest_TK, src_R).view(-1, crit.capacity, data.shape[-1])


def fast_decode(data: Tensor, crit: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Add the rows [E, C, M] of each token, by their weights if ``is_postscore``; [T, M]."""
    crit = Critical(*crit)
    weight_TK = crit.weights() if is_postscore else torch.ones_like(crit.weights())
    return ops.combine(data.reshape(-1, data.shape[-1]), *crit.maps(), weight_TK)


def get_topk_selection(crit: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the experts of each token [T, K], and the choices of each expert [E]."""
    return torch.stack([*Critical(*crit).indices], 1), Critical(*crit).dispatch_count


def get_reversed_sample_ids(crit: Sequence[Any], return_id_type: str = "sample_id") -> Tensor:
    """Return the token in each slot [E, C], or with ``"top_id"`` which choice it is; -1: none."""
    crit = Critical(*crit)
    pair_R, top_k = crit.maps()[1], len(crit.indices)
    by = {"sample_id": pair_R // top_k, "top_id": pair_R % top_k}
    return torch.where(pair_R < 0, -1, by[return_id_type]).view(-1, crit.capacity)


class fast_dispatcher:  # noqa: N801 (Tutel's name)
    """Encoder and decoder whose slots :meth:`update` sets, as Meta's and DeepSpeed's layers do."""

    def __init__(self, num_global_experts, capacity, model_dim, dispatch_dtype):
        self.num_global_experts, self.capacity = int(num_global_experts), int(capacity)
        self.model_dim, self.original_dtype = int(model_dim), dispatch_dtype

    def update(self, indices_, locations_, gates_, capacity=None, is_postscore=True) -> None:
        """Set the slots and weights of the choices, each a list of K tensors [T]."""
        self.capacity, self.is_postscore = int(capacity or self.capacity), is_postscore
        indices, locations = ([x.int().view(-1) for x in each] for each in (indices_, locations_))
        self._crit = Critical(
            self.num_global_experts, indices, locations, gates_, self.capacity, indices[0]
        )

    def encode(self, data: Tensor) -> Tensor:
        """Copy tokens [T, M] to rows [E * C, M]."""
        rows = fast_encode(data.to(self.original_dtype), self._crit, self.is_postscore)
        return rows.flatten(0, 1)

    def decode(self, data: Tensor) -> Tensor:
        """Add the rows [E * C, M] of each token; [T, M]."""
        return fast_decode(data.to(self.original_dtype), self._crit, self.is_postscore)


top_k_routing = extract_critical
