"""The worked examples in the kernels' docstrings, number by number."""

import inspect
import math

import pytest
import torch

from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.backends.triton import (
    _grouped,
    _grouped_tma,
    activation,
    adam,
    expert_ffn,
    gate_logits,
    gating,
    slots,
)


def tensors(device, *values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype, device=device) for value in values]


def ints(device, *values):
    return tensors(device, *values, dtype=torch.int32)


def topk_gating(device):
    logits, key = tensors(device, [[0, math.log(2), math.log(5)]], [[9, 0, 1]])
    expert, gate, prob_sum, _, lse, _ = kernels.topk_gating_fwd(logits, 2)
    yield expert, [[2, 1]]
    yield gate, [[5 / 8, 2 / 8]]
    yield prob_sum, [1 / 8, 2 / 8, 5 / 8]
    yield lse, [math.log(8)]
    expert, gate, *_ = kernels.topk_gating_fwd(logits, 2, key_TE=key)
    yield expert, [[0, 2]]
    yield gate, [[1 / 8, 5 / 8]]


def topk_gating_sums(device):
    partial, sums, entropy = tensors(device, [[1, 2, 0.5], [3, 4, 0.25]], [0, 0], 0)
    gating._topk_gating_sums_kernel[(1,)](sums, entropy, partial, 2, E=2, BLOCK_P=1, BLOCK_E=4)
    yield sums, [4, 6]
    yield entropy, 0.75


def topk_gating_bwd(device):
    d_gate, logits, lse = tensors(device, [[1]], [[0, 0]], [math.log(2)])
    (choice,) = ints(device, [[1]])
    got = kernels.topk_gating_bwd(d_gate, None, None, logits, lse, choice)
    yield got, [[-0.25, 0.25]]


def split(device):
    (wide,) = tensors(device, [[1.00390625, 2]])
    (factor,) = tensors(device, [[3]])
    halves, _, twice = gate_logits._split(wide, torch.bfloat16, 1, factor)
    yield halves, [[1, 2, 0.00390625, 0]]
    yield twice, [[3], [3]]


def join(device):
    (parts,) = tensors(device, [[1, 2], [10, 20]])
    yield gate_logits._join(parts, None, (1, 2), torch.float32, 2), [[11, 22]]
    (onto,) = tensors(device, [[100, 0]])
    yield gate_logits._join(parts, None, (1, 2), torch.float32, 2, onto), [[111, 22]]


def scaled_dot(device):
    (a,), (b,) = tensors(device, [1, 2]), ints(device, [3, 4])
    dot, weight = kernels.scaled_dot_fwd(a, b, 2.0)
    yield dot, 22
    yield weight, [6, 8]


def rank_in_block(device):
    expert, rank, hist = ints(device, [[2], [0], [2], [2]], [[9]] * 4, [[[9, 9, 9]]])
    sizes = {"E": 3, "TOP_K": 1, "BLOCK": 4, "BLOCK_E": 4}
    slots._rank_in_block_kernel[(1, 1)](rank, hist, expert, None, 4, 1, **sizes)
    yield rank, [[0], [0], [1], [2]]
    yield hist, [[[1, 0, 3]]]


def scan_blocks(device):
    hist, count = ints(device, [[[1], [2]], [[3], [4]]], [[9], [9]])
    slots._scan_blocks_kernel[(1,)](hist, count, 2, E=1, TOP_K=2, BLOCK_B=2, BLOCK_E=1)
    yield hist, [[[0], [1]], [[3], [6]]]
    yield count, [[3], [7]]


def add_offset(device):
    slot, expert, hist = ints(device, [[0], [1]], [[1], [1]], [[[5, 7]]])
    slots._add_offset_kernel[(1, 1)](slot, hist, expert, None, 2, 1, E=2, TOP_K=1, BLOCK=2)
    yield slot, [[7], [8]]


def token_to_rows(device):
    x, weight, other = tensors(device, [[1], [2]], [[1, 1], [10, 100]], [[1], [2], [3], [4]])
    row, pair = ints(device, [[1, -1], [2, 0]], [3, 0, 2, -1])
    rows, dot, _ = kernels.combine_bwd(x, other, row, pair, weight)
    yield rows, [[200], [1], [20], [0]]
    yield dot, [[2, 0], [6, 2]]
    biases = *tensors(device, [[10], [20]]), *ints(device, [[0, 1], [1, 0]])
    _, dot, d_bias = kernels.combine_bwd(x, other, row, pair, weight, *biases)
    yield dot, [[12, 0], [46, 22]]
    yield d_bias, [[1 * 1 + 100 * 2], [10 * 2]]  # the shares times x


def rows_to_token(device):
    rows, weight = tensors(device, [[1], [2], [3]], [[1, 1], [10, 100]])
    (row,) = ints(device, [[1, -1], [2, 0]])
    yield kernels.combine_fwd(rows, row, weight), [[2], [130]]
    biases = *tensors(device, [[10], [20]]), *ints(device, [[0, 1], [1, 0]])
    yield kernels.combine_fwd(rows, row, weight, *biases), [[12], [1330]]


def assign_rows(device):
    expert, position, num_routed = ints(device, [[1, 0]] * 2, [[0, 0], [1, 1]], [[0, 2], [2, 0]])
    (gate,) = tensors(device, [[3 / 4, 1 / 4], [1 / 2, 1 / 2]])
    options = {"capacity": 1, "padded": True, "normalize": True}
    got = kernels.assign_rows_fwd(expert, position, gate, num_routed, **options)
    want = [[1, 0], [-1, -1]], [1, 0], [[3 / 4, 1 / 4], [0, 0]], [1, 1], []
    yield from zip(got, want, strict=True)


def assign_rows_bwd(device):
    d_weight, gate = tensors(device, [[1, 0]], [[1 / 4, 1 / 4]])
    (row,) = ints(device, [[0, 1]])
    yield kernels.assign_rows_bwd(d_weight, gate, row, normalize=True), [[1, -1]]


def rows_product(device):
    rows, weight = tensors(device, [[1], [2], [3]], [[[10]], [[100]]])
    (offsets,) = ints(device, [1, 2])
    yield _grouped.rows_product(rows, weight, offsets), [[10], [200], [0]]


def weight_gradient(device):
    d, rows = tensors(device, [[1], [2], [3]], [[10], [100], [1000]])
    (offsets,) = ints(device, [1, 3])
    yield _grouped.weight_gradient(d, rows, offsets), [[[10]], [[3200]]]


def rows_product_tma(device):
    rows, weight, offsets = _aligned_product(device, [1, 2])
    tile = _grouped_tma.tma_tiles(False)[-1]
    got = _grouped_tma.rows_product_tma(rows, weight, offsets, None, tile)
    yield got[:2, :1], [[10], [200]]


def weight_gradient_tma(device):
    d, _, offsets = _aligned_product(device, [1, 3])
    other = torch.zeros_like(d)
    other[:, 0] = torch.tensor([10, 100, 1000])
    tile = _grouped_tma.tma_tiles(False)[-1]
    got = _grouped_tma.weight_gradient_tma(d, other, offsets, None, tile)
    yield got[:, :1, :1], [[[10]], [[3200]]]


def _aligned_product(device, ends):
    """The numbers of the examples in the first columns of rows of 16 bytes, which TMA needs."""
    if device.type == "cuda" and not _grouped_tma.has_tma(device):
        pytest.skip("a GPU without TMA")
    rows, weight = (torch.zeros(s, dtype=torch.float16) for s in ((3, 8), (2, 8, 8)))
    rows[:, 0] = torch.tensor([1, 2, 3])
    weight[:, 0, 0] = torch.tensor([10, 100])
    return rows.to(device), weight.to(device), *ints(device, ends)


def clear_unused(device):
    gradient, offsets = *tensors(device, [[[7]], [[9]]]), *ints(device, [0, 3])
    _grouped._clear_unused(gradient, offsets)
    yield gradient, [[[0]], [[9]]]


def bias_act(device):
    h, bias = tensors(device, [[[-3]], [[1]]], [[1], [2]])
    yield kernels.bias_act_fwd(h, bias, activation="relu"), [[[0]], [[3]]]
    h, bias = tensors(device, [[[0, 5]], [[99, 5]]], [[0, 1], [1, 1]])
    yield kernels.bias_act_fwd(h, bias, activation="swiglu"), [[[0]], [[600]]]


def bias_act_bwd_dh(device):
    h, bias, dy = tensors(device, [[[-3], [1]]], [[1]], [[[5], [7]]])
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, activation="relu")
    yield d_h, [[[0], [7]]]
    yield d_bias, [[7]]
    h, bias, dy = tensors(device, [[[0, 4], [100, 4]]], [[0, 1]], [[[2], [2]]])
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, activation="swiglu")
    yield d_h, [[[5, 0], [10, 200]]]
    yield d_bias, [[15, 200]]
    weight = torch.tensor([2.0, 3.0], device=device)
    options = {"activation": "swiglu", "offsets": None, "dropout_p": 0.0, "seed": None}
    d_h, d_bias, active, dot = expert_ffn.weighted_act_bwd(dy, h, bias, weight, **options)
    yield d_h, [[[10, 0], [30, 600]]]
    yield d_bias, [[40, 600]]
    yield active, [[[0], [1500]]]
    yield dot, [0, 1000]


def bias_act_bwd_db(device):
    partial, d_bias = tensors(device, [[1], [2], [3], [4]], [[9], [9]])
    blocks = {"TILE": 2, "BLOCK_EXPERTS": 4, "BLOCK_Z": 1, "BLOCK_W": 1}
    kernel = activation._bias_act_bwd_db_kernel
    kernel[(2, 1)](d_bias, partial, None, 6, 3, e=2, W=1, **blocks)
    yield d_bias, [[3], [7]]


def encode_rows(device):
    wire, sums = kernels.encode_rows(*tensors(device, [[448, -3, 0.5]]), "e4m3")
    yield wire, [[0x7E, 0xC4, 0x30, 127]]
    yield sums, [0, 448**2 + 3**2 + 0.5**2]


def decode_rows(device):
    (wire,) = tensors(device, [[0x7E, 0xC4, 0x30, 128]], dtype=torch.uint8)
    yield kernels.decode_rows(wire, "e4m3", torch.empty(1, 3, device=device)), [[896, -6, 1]]


def _adam16(device, step):
    """One step of [1], so late that nothing is left of the bias correction."""
    options = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "eps": 0.0, "weight_decay": 0.0, "step": 1000}
    param, grad, multiplier, *scales = tensors(device, [1], [2], 1, 1, 1)
    avg, sq = tensors(device, [0], [0], dtype=torch.float16)
    new = step(param, grad, avg, sq, *scales, grad_multiplier=multiplier, **options)
    yield param, [1 - 2**-0.5]
    yield from zip((avg, sq, *(new or scales)), ([2**14], [2**14], 2**-14, 2**-13), strict=True)


def adam16_step(device):
    return _adam16(device, kernels.adam16_step_)


def adam16_small(device):
    return _adam16(device, lambda *state, **given: kernels.adam16_steps_([state], **given))


def adam16_max(device):
    grad, one = tensors(device, [[1, -2]], 1)
    stats = torch.zeros((1, 2), dtype=torch.float16, device=device)
    bits = torch.empty((2, 1, 1), dtype=torch.int32, device=device)
    halves = 4 * [0.5]
    adam._adam16_max_kernel[(1, 1)](bits, grad, stats, stats, one, one, one, 2, *halves, BLOCK=2)
    yield bits.flatten().view(torch.float32), [1, 2]


def quantize_rows(device):
    values, scale = kernels.quantize_rows(*tensors(device, [[896, -6, 1]]))
    yield values.view(torch.uint8), [[0x7E, 0xC4, 0x30]]
    yield scale, [2]


KERNELS = {
    name.removeprefix("_").removesuffix("_kernel"): kernel
    for module in filter(inspect.ismodule, vars(kernels).values())
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_example_of_the_docstring(name, device):
    """Number by number; a kernel that is added needs a function of its name above."""
    kernel = KERNELS[name]
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    assert "Example:" in kernel.__doc__
    example = globals()[name.removesuffix("_fwd")]
    for got, want in example(device):
        want = torch.tensor(want, dtype=got.dtype, device=device)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
