"""The worked examples in the kernels' docstrings, number by number."""

import math

import torch
import triton
import triton.language as tl

from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.backends.triton import (
    _grouped,
    activation,
    cumsum,
    dispatch,
    gating,
    rows,
    slots,
    wire,
)
from fairseq_tutel.backends.triton._activations import normal_cdf, tanh
from fairseq_tutel.backends.triton._tiles import ragged_tiles, tile_rows
from fairseq_tutel.backends.triton.wire import from_8_bits, to_8_bits


def tensors(device, *values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype, device=device) for value in values]


def ints(device, *values):
    return tensors(device, *values, dtype=torch.int32)


def test_topk_gating(device):
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]], device=device)
    expert, gate, prob_sum, _, lse, _ = kernels.topk_gating_fwd(logits, 2)
    assert expert.tolist() == [[2, 1]]
    torch.testing.assert_close(gate.cpu(), torch.tensor([[5 / 8, 2 / 8]]))
    torch.testing.assert_close(prob_sum.cpu(), torch.tensor([1 / 8, 2 / 8, 5 / 8]))
    torch.testing.assert_close(lse.cpu(), torch.tensor([math.log(8)]))
    (key,) = tensors(device, [[9, 0, 1]])
    expert, gate, *_ = kernels.topk_gating_fwd(logits, 2, key_TE=key)
    assert expert.tolist() == [[0, 2]]
    torch.testing.assert_close(gate.cpu(), torch.tensor([[1 / 8, 5 / 8]]))


def test_topk_gating_sums(device):
    (partial,) = tensors(device, [[1, 2, 0.5], [3, 4, 0.25]])
    prob_sum, entropy = torch.empty(2, device=device), torch.empty((), device=device)
    gating._topk_gating_sums_kernel[(1,)](prob_sum, entropy, partial, 2, E=2, BLOCK_P=1, BLOCK_E=4)
    assert prob_sum.tolist() == [4, 6] and entropy.item() == 0.75


def test_topk_gating_bwd(device):
    logits, d_gate, d_prob_sum, d_lse, lse = tensors(
        device, [[0, 0]], [[1]], [0, 0], [0], [math.log(2)]
    )
    (choice,) = ints(device, [[1]])
    got = kernels.topk_gating_bwd(d_gate, d_prob_sum, d_lse, logits, lse, choice)
    torch.testing.assert_close(got.cpu(), torch.tensor([[-0.25, 0.25]]))


def test_rank_in_block(device):
    (expert,) = ints(device, [[2], [0], [2], [2]])
    rank = torch.empty_like(expert)
    hist = torch.empty((1, 1, 3), dtype=torch.int32, device=device)
    slots._rank_in_block_kernel[(1, 1)](
        rank, hist, expert, None, 4, 1, E=3, TOP_K=1, HAS_ORDER=False, BLOCK=4, BLOCK_E=4
    )
    assert rank.tolist() == [[0], [0], [1], [2]]
    assert hist.tolist() == [[[1, 0, 3]]]


def test_scan_blocks(device):
    (hist,) = ints(device, [[[1], [2]], [[3], [4]]])
    count = torch.empty((2, 1), dtype=torch.int32, device=device)
    slots._scan_blocks_kernel[(1,)](hist, count, 2, E=1, TOP_K=2, BLOCK_B=2, BLOCK_E=1)
    assert hist.tolist() == [[[0], [1]], [[3], [6]]]
    assert count.tolist() == [[3], [7]]


def test_add_offset(device):
    slot, expert, hist = ints(device, [[0], [1]], [[1], [1]], [[[5, 7]]])
    slots._add_offset_kernel[(1, 1)](
        slot, hist, expert, None, 2, 1, E=2, TOP_K=1, HAS_ORDER=False, BLOCK=2
    )
    assert slot.tolist() == [[7], [8]]


def test_column_sums(device):
    (mask,) = ints(device, [[1], [0], [1]])
    total = torch.empty((2, 1), dtype=torch.int32, device=device)
    cumsum._column_sums_kernel[(2, 1)](total, mask, 3, E=1, BLOCK_T=2, BLOCK_E=1)
    assert total.tolist() == [[1], [1]]


def test_cumsum_sub_one(device):
    (mask,) = ints(device, [[1], [0], [1]])
    assert kernels.fast_cumsum_sub_one(mask).tolist() == [[0], [0], [1]]


def test_token_to_rows(device):
    x, weight, other = tensors(device, [[1], [2]], [[1, 1], [10, 100]], [[1], [2], [3], [4]])
    row, pair = ints(device, [[1, -1], [2, 0]], [3, 0, 2, -1])
    rows, dot = kernels.combine_bwd(x, other, row, pair, weight)
    assert rows.tolist() == [[200], [1], [20], [0]] and dot.tolist() == [[2, 0], [6, 2]]


def test_rows_to_token(device):
    rows, weight = tensors(device, [[1], [2], [3]], [[1, 1], [10, 100]])
    (row,) = ints(device, [[1, -1], [2, 0]])
    assert kernels.combine_fwd(rows, row, weight).tolist() == [[2], [130]]


def test_assign_rows(device):
    expert, position, num_routed = ints(device, [[1, 0]] * 2, [[0, 0], [1, 1]], [[0, 2], [2, 0]])
    (gate,) = tensors(device, [[3 / 4, 1 / 4], [1 / 2, 1 / 2]])
    got = kernels.assign_rows_fwd(
        expert, position, gate, num_routed, capacity=1, padded=True, normalize=True
    )
    want = [[[1, 0], [-1, -1]], [1, 0], [[3 / 4, 1 / 4], [0, 0]], [1, 1]]
    assert [x.tolist() for x in got] == want


def test_assign_rows_bwd(device):
    d_weight, gate = tensors(device, [[1, 0]], [[1 / 4, 1 / 4]])
    (dest_row,) = ints(device, [[0, 1]])
    got = kernels.assign_rows_bwd(d_weight, gate, dest_row, normalize=True)
    assert got.tolist() == [[1, -1]]


def test_rows_product(device):
    rows, weight = tensors(device, [[1], [2], [3]], [[[10]], [[100]]])
    (offsets,) = ints(device, [1, 2])
    assert _grouped.rows_product(rows, weight, offsets).tolist() == [[10], [200], [0]]


def test_weight_gradient(device):
    d, rows = tensors(device, [[1], [2], [3]], [[10], [100], [1000]])
    (offsets,) = ints(device, [1, 3])
    assert _grouped.weight_gradient(d, rows, offsets).tolist() == [[[10]], [[3200]]]


def test_bias_act_fwd(device):
    h, bias = tensors(device, [[[-3]], [[1]]], [[1], [2]])
    assert kernels.bias_act_fwd(h, bias, activation="relu").tolist() == [[[0]], [[3]]]


def test_bias_act_bwd(device):
    h, bias, dy = tensors(device, [[[-3], [1]]], [[1]], [[[5], [7]]])
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, activation="relu")
    assert d_h.tolist() == [[[0], [7]]] and d_bias.tolist() == [[7]]


def test_bias_act_bwd_db(device):
    (partial,) = tensors(device, [[1], [2], [3], [4]])
    d_bias = torch.empty((2, 1), device=device)
    activation._bias_act_bwd_db_kernel[(2, 1)](
        d_bias, partial, None, 6, 3, e=2, F=1, RAGGED=False, TILE=2, BLOCK_EXPERTS=4, BLOCK_Z=1,
        BLOCK_F=1,
    )  # fmt: skip
    assert d_bias.tolist() == [[3], [7]]


def test_encode_rows(device):
    (rows,) = tensors(device, [[448, -3, 0.5]])
    bytes_, sums = kernels.encode_rows(rows, "e4m3")
    assert bytes_.tolist() == [[0x7E, 0xC4, 0x30, 127]]
    assert sums.tolist() == [0, 448**2 + 3**2 + 0.5**2]


def test_decode_rows(device):
    (bytes_,) = tensors(device, [[0x7E, 0xC4, 0x30, 128]], dtype=torch.uint8)
    out = torch.empty(1, 3, device=device)
    assert kernels.decode_rows(bytes_, "e4m3", out).tolist() == [[896, -6, 1]]


@triton.jit
def _bytes_kernel(out_ptr, number_ptr, x_ptr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    lane = tl.arange(0, 256)
    byte = to_8_bits(tl.load(x_ptr + lane), MANTISSA, BIAS)
    tl.store(out_ptr + lane, byte)
    tl.store(number_ptr + lane, from_8_bits(byte, MANTISSA, BIAS))


def test_every_number_of_8_bits(device):
    """Each format's numbers come back, by the bytes that torch gives them."""
    for dtype, mantissa, bias in ((torch.float8_e4m3fn, 3, 7), (torch.float8_e5m2, 2, 15)):
        x = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        x[~x.isfinite()] = 0
        byte = torch.empty(256, dtype=torch.int32, device=device)
        number = torch.empty(256, device=device)
        _bytes_kernel[(1,)](byte, number, x.to(device), MANTISSA=mantissa, BIAS=bias)
        assert byte.tolist() == x.to(dtype).view(torch.uint8).tolist()
        assert number.tolist() == x.tolist()


@triton.jit
def _helpers_kernel(tanh_ptr, normal_ptr, tiles_ptr, rows_ptr, z_ptr, offsets_ptr, num_rows):
    """Writes what the device functions return, for test_device_functions."""
    lane = tl.arange(0, 4)
    z = tl.load(z_ptr + lane)
    tl.store(tanh_ptr + lane, tanh(z))
    cdf, density = normal_cdf(2.0 * z)
    tl.store(normal_ptr + lane, cdf)
    tl.store(normal_ptr + 4 + lane, density)
    _, start, end, tiles = ragged_tiles(offsets_ptr, num_rows, 3, 2, 4)
    tl.store(tiles_ptr + lane, start)
    tl.store(tiles_ptr + 4 + lane, end)
    tl.store(tiles_ptr + 8 + lane, tiles)
    for pid in range(0, 6):
        expert, first, last = tile_rows(pid, offsets_ptr, num_rows, 0, 3, True, 2, 4)
        tl.store(rows_ptr + 3 * pid, expert)
        tl.store(rows_ptr + 3 * pid + 1, first)
        tl.store(rows_ptr + 3 * pid + 2, last)


def test_device_functions(device):
    (z,) = tensors(device, [0, 0.5, -20, 1e-3])
    normal = torch.empty((2, 4), device=device)
    (offsets,) = ints(device, [3, 3, 7])
    tanhs = torch.empty(4, device=device)
    tiles = torch.empty((3, 4), dtype=torch.int64, device=device)
    rows = torch.empty((6, 3), dtype=torch.int64, device=device)
    _helpers_kernel[(1,)](tanhs, normal, tiles, rows, z, offsets, 9)
    want = torch.tensor([0, 0.46211716, -1, 1e-3 - 1e-9 / 3])
    torch.testing.assert_close(tanhs.cpu(), want, rtol=1e-6, atol=0)
    want = torch.tensor([[0.5, 0.8413447, 0, 0.5007979], [1, 0.6065307, 0, 0.999998]])
    torch.testing.assert_close(normal.cpu(), want, rtol=2e-6, atol=0)
    assert tiles.tolist() == [[0, 3, 3, 7], [3, 3, 7, 9], [2, 0, 2, 1]]
    assert rows[:5].tolist() == [[0, 0, 3], [0, 2, 3], [2, 3, 7], [2, 5, 7], [3, 7, 9]]
    assert rows[5, 1] >= rows[5, 2]  # past the last tile: no rows


def test_the_examples_are_those_of_the_docstrings():
    """Every kernel has an example; one that is added needs a test above."""
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for module in (activation, cumsum, dispatch, gating, _grouped, rows, slots, wire):
        for name, value in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            function = getattr(value, "fn", value)
            function = getattr(function, "fn", function)
            assert "Example:" in function.__doc__, name
            plain = name.removeprefix("_").removesuffix("_kernel")
            assert plain.removesuffix("_fwd").removesuffix("_dh") in tested | {"bias_act"}, name
