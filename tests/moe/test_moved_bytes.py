"""Bytes that a dropless layer moves beside its products, as Triton's kernels would on a GPU."""

import pytest
import torch
from helpers.dispatched import VIEWS, Dispatched

from fairseq_tutel.moe import MoELayer

PRODUCTS = ("product", "weight_gradient", "mm")
TOKENS, MODEL, HIDDEN, TOP_K = 128, 2048, 1024, 8


class _Bytes(Dispatched):
    """Sums the bytes of all tensors of operations that are neither a view nor a product."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ not in VIEWS:
            self.add(func.overloadpacket.__name__, (*args, *(kwargs or {}).values(), out))
        return out

    def add(self, name, values):
        """Each tensor of a call is read or written once."""
        if not any(part in name for part in PRODUCTS):
            tensors = {}
            for value in values:
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(each, torch.Tensor):
                        tensors[each.data_ptr(), each.numel()] = each.nbytes
            self.moved += sum(tensors.values())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("network", "before", "at_most"), [("ffn", 105.9, 0.60), ("swiglu", 115.7, 0.65)]
)
def test_fine_grained_experts(network, before, at_most, backend, monkeypatch):
    """Kernels are counted and not run, so that the sizes are those of a model.

    ``before`` are the reads and writes of a token's row, counted in the same way at 204ed4b.
    """
    from triton.runtime.interpreter import GridExecutor

    backend("triton")
    count = _Bytes()
    monkeypatch.setattr(
        GridExecutor,
        "__call__",
        lambda self, *args, **kwargs: count.add(self.fn.__name__, (*args, *kwargs.values())),
    )
    options = {"top_k": TOP_K, "capacity_factor": 0.0, "seed": 1, "expert_network": network}
    layer = MoELayer(MODEL, 8, HIDDEN, **options).bfloat16()
    x = torch.randn(TOKENS, MODEL, dtype=torch.bfloat16, requires_grad=True)
    d_y = torch.ones_like(x)
    with count:
        y, aux = layer(x, return_aux=True)
        torch.autograd.backward([y, aux.loss], [d_y, torch.ones_like(aux.loss)])
    moved = count.moved / (TOKENS * MODEL * 2)
    assert 50 < moved <= at_most * before, moved
