"""The single operators of the layer, each with the bytes that it must at least move.

The bytes count every input that is read and every output that is written once, in the dtype that
they have: what a perfect kernel with a perfect cache would move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from presets import DTYPES, LayerShape
from torch import Tensor

from fairseq_tutel import ops
from fairseq_tutel.ops.backend import implementation

# Operators that torch has too, in the way they are otherwise written.
TORCH_TWINS = {
    "fast_cumsum_sub_one int64": "torch.cumsum - 1 int64",
    "fast_cumsum_sub_one int32": "torch.cumsum - 1 int32",
}


@dataclass(frozen=True)
class KernelCase:
    """One operator on input sets that take turns.

    Attributes:
        name: of the operator, with ``bwd`` for its gradient.
        call: input set -> outputs.
        inputs: one tuple of arguments per set.
        own: False for torch's own way of doing the same.
        unread: inputs of the first set -> bytes of them that need not be read.
    """

    name: str
    call: Callable[..., object]
    inputs: Sequence[tuple] = field(repr=False)
    own: bool = True
    unread: Callable[..., int] = lambda *inputs: 0

    def bytes_moved(self) -> int:
        """Of inputs and outputs, each once."""
        inputs = self.inputs[0]
        return sum(map(_bytes, inputs)) - self.unread(*inputs) + _bytes(self.call(*inputs))


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0


def _unused(rows: Tensor, pair: Tensor) -> int:
    """Bytes of the rows that no token is in."""
    return int((pair < 0).sum()) * rows.shape[-1] * rows.element_size()


def make_kernel_cases(
    shape: LayerShape, device: torch.device, seed: int, sets: int
) -> list[KernelCase]:
    """All operators at the sizes of one layer; the rows that this rank sends.

    Args:
        sets: input sets; more of them than fit into the cache.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[shape.dtype]
    T, E, K, M = shape.tokens, shape.experts, shape.top_k, shape.model_dim
    local = shape.local_experts(1)
    N = shape.rows(1) // local

    def randn(*size, dtype=dtype):
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    def over(make):
        return [make() for _ in range(sets)]

    logits = over(lambda: randn(T, E, dtype=torch.float32))
    routed = [_route(x, K, E, shape.capacity) for x in logits]
    tokens, grads = over(lambda: randn(T, M)), over(lambda: randn(T, M))
    rows = over(lambda: randn(E * shape.capacity, M))
    hidden = over(lambda: randn(local, N, shape.hidden_dim))
    d_hidden = over(lambda: randn(local, N, shape.hidden_dim))
    bias = randn(local, shape.hidden_dim)
    cases = [
        KernelCase(
            "topk_gating",
            lambda x: torch.ops.fairseq_tutel.topk_gating(x, K, None, None),
            [(x,) for x in logits],
        ),
        KernelCase(
            "topk_gating bwd",
            torch.ops.fairseq_tutel.topk_gating_bwd,
            [_gating_gradients(x, K, E) for x in logits],
        ),
        KernelCase(
            "assign_slots",
            lambda expert: ops.assign_slots(expert, E),
            [(r.expert,) for r in routed],
        ),
        KernelCase(
            "assign_rows",
            lambda *args: ops.assign_rows(
                *args, capacity=shape.capacity, padded=True, normalize=K > 1
            ),
            [(r.expert, r.position, r.gate, r.num_routed) for r in routed],
        ),
        KernelCase(
            "dispatch",
            ops.dispatch,
            [(x, r.row, r.pair) for x, r in zip(tokens, routed, strict=True)],
            unread=lambda x, row, pair: _bytes(row),
        ),
        KernelCase(
            "dispatch bwd",
            _dispatch_bwd,
            [(d, r.row, r.pair) for d, r in zip(rows, routed, strict=True)],
            unread=lambda d, row, pair: _bytes(pair) + _unused(d, pair),
        ),
        KernelCase(
            "combine",
            ops.combine,
            [(x, r.row, r.pair, r.weight) for x, r in zip(rows, routed, strict=True)],
            unread=lambda x, row, pair, weight: _bytes(pair) + _unused(x, pair),
        ),
        KernelCase(
            "combine bwd",
            _combine_bwd,
            [(d, x, r.row, r.pair, r.weight) for d, x, r in zip(grads, rows, routed, strict=True)],
            unread=lambda d, x, row, pair, weight: _bytes(row) + _unused(x, pair),
        ),
        KernelCase(
            "bias_act gelu",
            _bias_act,
            [(h, bias) for h in hidden],
        ),
        KernelCase(
            "bias_act gelu bwd",
            _bias_act_bwd,
            [(d, h, bias) for d, h in zip(d_hidden, hidden, strict=True)],
        ),
    ]
    return [*cases, *_cumsum_cases(routed, E)]


@dataclass(frozen=True)
class _Routed:
    """Routing of one input set: the maps of the padded layout."""

    expert: Tensor
    position: Tensor
    gate: Tensor
    num_routed: Tensor
    row: Tensor
    pair: Tensor
    weight: Tensor


def _route(logits, top_k, num_experts, capacity):
    expert, gate, *_ = ops.topk_gating(logits, top_k)
    position, num_routed = ops.assign_slots(expert, num_experts)
    row, pair, weight, _ = ops.assign_rows(
        expert, position, gate, num_routed, capacity=capacity, padded=True, normalize=top_k > 1
    )
    return _Routed(expert, position, gate, num_routed, row, pair, weight)


def _gating_gradients(logits, top_k, num_experts):
    expert, gate, prob_sum, _, lse = ops.topk_gating(logits, top_k)
    return (
        torch.randn_like(gate),
        torch.randn_like(prob_sum),
        torch.randn_like(lse),
        logits,
        lse,
        expert,
    )


def _dispatch_bwd(d_rows, row, pair):
    return torch.ops.fairseq_tutel.dispatch_bwd(d_rows, row)


def _combine_bwd(dy, rows, row, pair, weight):
    return torch.ops.fairseq_tutel.combine_bwd(dy, rows, row, pair, weight, True, True)


def _bias_act(h, bias):
    return implementation("bias_act_fwd", h)(h, bias, activation="gelu")


def _bias_act_bwd(dy, h, bias):
    return implementation("bias_act_bwd", dy)(dy, h, bias, activation="gelu")


def _cumsum_cases(routed, num_experts):
    """On the 0/1 mask of the first choices, as fairseq's one-hot gives it and in 32 bits."""
    cases = []
    for dtype, name in ((torch.int64, "int64"), (torch.int32, "int32")):
        masks = [
            (torch.nn.functional.one_hot(r.expert[:, 0].long(), num_experts).to(dtype),)
            for r in routed
        ]
        cases.append(KernelCase(f"fast_cumsum_sub_one {name}", ops.fast_cumsum_sub_one, masks))
        cases.append(KernelCase(f"torch.cumsum - 1 {name}", _torch_cumsum, masks, own=False))
    return cases


def _torch_cumsum(mask):
    return torch.cumsum(mask, dim=0) - 1
