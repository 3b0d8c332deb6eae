"""Rows and weights of pairs: kernels and torch against loops over tokens."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels

CASES = [
    pytest.param(37, 5, 2, 9, id="T37-E5-K2"),  # some overflow, T is no power of two
    pytest.param(40, 4, 1, 3, id="K1-most-dropped"),
    pytest.param(11, 4, 4, 11, id="K4=E"),
    pytest.param(9, 7, 6, 5, id="K6"),
    pytest.param(12, 3, 2, None, id="dropless"),
    pytest.param(12, 3, 2, 0, id="C0"),
    pytest.param(0, 3, 2, 4, id="T0"),
    pytest.param(33, 40, 2, 40, id="mostly-unused-rows"),
]


def inputs(T, E, K):
    generator = torch.Generator().manual_seed(T + K)
    expert = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)] or
                         [torch.empty(K)])[:T].int()  # fmt: skip
    expert[torch.rand(T, K, generator=generator) < 0.2] = -1
    position, num_routed = torch_backend.assign_slots(expert, E)
    gate = torch.rand(T, K, generator=generator)
    gate[::5] = 0  # a sum of zero is not divided by
    return expert, position, gate, num_routed


@pytest.mark.parametrize("normalize", [False, True], ids=["as-is", "normalised"])
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize(("T", "E", "K", "capacity"), CASES)
def test_assign_rows(T, E, K, capacity, padded, normalize, device):
    if padded and capacity is None:
        pytest.skip("no such layout")
    expert, position, gate, num_routed = inputs(T, E, K)
    options = {"capacity": capacity, "padded": padded, "normalize": normalize}
    leaf = gate.double().requires_grad_()
    want = naive.assign_rows(expert, position, leaf, E, **options)
    d_weight = torch.randn(T, K)
    want_grad = torch.zeros(T, K)
    if want[2].requires_grad:
        (want_grad,) = torch.autograd.grad(want[2], leaf, d_weight.double())
    for room in (torch_backend, kernels):
        on = torch.device("cpu") if room is torch_backend else device
        args = [x.to(on) for x in (expert, position, gate, num_routed)]
        end = want[3].cumsum(0) if not padded else want[3][:0]
        *found, counts = room.sort_pairs_fwd(args[0], args[2], E, priority_T=None, **options)
        assert torch.equal(counts, args[3])
        for got in (room.assign_rows_fwd(*args, **options), found):
            dest_row, src_pair, weight, num_kept, row_end = got
            exact = (want[0], want[1], want[3], end)
            for a, b in zip((dest_row, src_pair, num_kept, row_end), exact, strict=True):
                assert a.dtype == torch.int32 and a.tolist() == b.tolist()
            assert_close("weight", weight, want[2], torch.float32)
        got = room.assign_rows_bwd(d_weight.to(on), args[2], dest_row, normalize=normalize)
        assert_close("d_gate", got, want_grad, torch.float32)
