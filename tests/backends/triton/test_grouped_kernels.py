"""Products of ragged rows: kernels against a product per expert."""

import contextlib
from functools import partial

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close

from fairseq_tutel.backends.triton import _grouped as kernels
from fairseq_tutel.backends.triton import _grouped_tma as tma

ENDS = {
    "uneven": [3, 30, 41, 57],
    "all on one": [0, 0, 57, 57],
    "an empty expert and unused rows": [20, 20, 33, 40],
    "no rows at all": [0, 0, 0, 0],
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
R, A, B = 57, 33, 20  # no multiples of a tile


def make(ends, dtype, device, shapes=((R, A), (4, A, B), (R, B))):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]
    made[0][ends[-1] :] = float("nan")  # rows of nobody may hold anything
    made[2][ends[-1] :] = float("nan")
    return *made, torch.tensor(ends, dtype=torch.int32, device=device)


def check(products, gradients, args, dtype):
    """Compare with a product per expert, whose weight is plain, or transposed as in training."""
    rows, weight, other, offsets = args
    ends = offsets.tolist()
    used = ends[-1]
    want = naive.rows_product(rows.double(), weight.double(), ends)[:used]
    for given in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        for product in products:
            got = product(rows, given, offsets)[:used]
            assert got.dtype == dtype
            assert_close("product", got, want, dtype)
    want = naive.weight_gradient(rows.double(), other.double(), ends)
    for gradient in gradients:
        got = gradient(rows, other, offsets)
        assert got.dtype == dtype and got.is_contiguous()
        assert_close("gradient", got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_equals_a_product_per_expert(ends, dtype, device):
    check([kernels.rows_product], [kernels.weight_gradient], make(ends, dtype, device), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_kernels_with_tma_loads_equal_a_product_per_expert(ends, dtype, device):
    if device.type == "cuda" and not tma.has_tma(device):
        pytest.skip("a GPU without TMA")
    args = rows, weight, other, offsets = make(ends, dtype, device, ((R, 40), (4, 40, 24), (R, 24)))
    assert tma.describable(rows, weight)
    few, many = tma.tma_tiles(True), tma.tma_tiles(False)
    products = [partial(tma.rows_product_tma, source=None, tile=tile) for tile in {*few, *many}]
    gradients = [partial(tma.weight_gradient_tma, source=None, tile=tile) for tile in many]
    check(products, gradients, args, dtype)


@pytest.mark.parametrize("way", ["every GPU", "TMA"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_gathered_inside_of_a_product(way, dtype, device):
    """Row r is token pair[r] // 3; the last rows have no token, and no row is token 0."""
    if way == "TMA" and (
        dtype == torch.float32 or (device.type == "cuda" and not tma.has_tma(device))
    ):
        pytest.skip("kernels with TMA loads are for halves, and for GPUs that have it")
    ends = ENDS["an empty expert and unused rows"]
    _, weight, other, offsets = make(ends, dtype, device, ((R, 40), (4, 40, 24), (R, 24)))
    tokens = torch.randn(19, 40).to(dtype).to(device)
    tokens[0] = float("nan")
    pair = torch.randperm(R).int().clamp(min=3).to(device)
    pair[ends[-1] :] = -1
    rows, source = tokens[pair.long() // 3], tma.Source(pair, 3)
    used, exact = ends[-1], rows.double()
    if way == "TMA":
        tile = tma.tma_tiles(False)[-1]
        got = tma.rows_product_tma(tokens, weight, offsets, source, tile)
        gradient = tma.weight_gradient_tma(other, tokens, offsets, source, tile)
    else:
        got = kernels._rows_product(tokens, weight, offsets, source)
        gradient = kernels.weight_gradient(other, tokens, offsets, source)
    want = naive.rows_product(exact, weight.double(), ends)[:used]
    assert_close("product", got[:used], want, dtype)
    want = naive.weight_gradient(other.double(), exact, ends)
    assert_close("gradient", gradient, want, dtype)


EVERYWHERE, MINE, CPU = torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.mark.skipif(not hasattr(MINE, "fp32_precision"), reason="a torch before 2.9")
@pytest.mark.parametrize(
    ("old", "new", "tf32"),
    [
        (None, [], False),
        (None, [(EVERYWHERE, "tf32")], True),
        (None, [(MINE, "tf32")], True),
        (None, [(MINE, "ieee")], False),
        (None, [(EVERYWHERE, "tf32"), (MINE, "ieee")], False),
        (None, [(CPU, "bf16")], False),
        ("high", [], True),
        ("medium", [], True),
        ("high", [(MINE, "ieee")], False),
    ],
)
def test_tf32_if_torchs_own_products_use_it(old, new, tf32):
    """An option of torch 2.9 makes torch's getters of the old ones raise."""
    try:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        for owner, value in new:
            owner.fp32_precision = value
        assert kernels._precision(torch.float32)["PRECISION"] == ("tf32" if tf32 else "ieee")
        assert kernels._precision(torch.float16)["PRECISION"] == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        for owner in (EVERYWHERE, MINE, CPU):
            owner.fp32_precision = "none"


@pytest.mark.interpreted
def test_which_implementations_compete(monkeypatch, device):
    """Hopper's: TMA for fp16 and few rows, grouped_mm for bf16, the kernel for all the rest."""
    tried = []
    monkeypatch.setattr(kernels, "has_tma", lambda device: True)
    monkeypatch.setattr(kernels, "tma_tiles", lambda few_rows: ("few",) if few_rows else ("many",))
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *args, offs: "torch", raising=False
    )
    monkeypatch.setattr(kernels, "_HAS_GROUPED_MM", True)
    monkeypatch.setattr(kernels, "rows_product_tma", lambda *given: given[-1])
    monkeypatch.setattr(kernels, "_rows_product", lambda *given: "every GPU")

    def fastest(key, tune, candidates):
        tried.append((tune, [candidate() for candidate in candidates]))

    monkeypatch.setattr(kernels, "fastest", fastest)
    offsets = torch.tensor([1, 2], dtype=torch.int32)

    def chosen(dtype, num_rows, width=16, start=0):
        rows = torch.empty(num_rows * width + start, dtype=dtype)[start:].view(num_rows, width)
        weight = torch.empty((2, width, 8), dtype=dtype)
        return kernels.rows_product(rows, weight, offsets) or tried.pop()

    half, brain = torch.float16, torch.bfloat16
    assert chosen(half, 2 * kernels.FEW_ROWS) == (True, ["few"])
    assert chosen(half, 2 * kernels.FEW_ROWS + 1) == (False, ["many"])
    assert chosen(half, kernels.TUNE_ROWS) == (True, ["many"])
    assert chosen(brain, 8) == (True, ["torch", "few"])
    assert chosen(brain, kernels.TUNE_ROWS) == (True, ["torch"])
    assert chosen(torch.float32, 8) == "every GPU"
    assert chosen(half, 8, width=12) == "every GPU"  # rows of 24 bytes
    assert chosen(brain, 8, start=1) == "every GPU"  # a view of a flat buffer


@pytest.mark.interpreted
@pytest.mark.parametrize("num_rows", [8, 0])
def test_candidates_are_timed_on_the_gpu_of_their_tensors_if_there_are_rows(num_rows, monkeypatch):
    """Not on the current GPU; without rows there is nothing to time or to keep."""
    guarded, timed = [], []

    @contextlib.contextmanager
    def guard(tensor):
        guarded.append(tensor)
        yield
        guarded.pop()

    def fastest(key, tune, candidates):
        timed.append(bool(guarded))
        return rows

    monkeypatch.setattr(kernels, "has_tma", lambda device: True)
    monkeypatch.setattr(kernels, "device_guard", guard)
    monkeypatch.setattr(kernels, "fastest", fastest)
    rows, weight = torch.randn(num_rows, 16).half(), torch.randn(2, 16, 8).half()
    offsets = torch.tensor([0, num_rows], dtype=torch.int32)
    assert kernels.rows_product(rows, weight, offsets).shape[0] == num_rows
    gradient = kernels.weight_gradient(rows, rows, offsets)
    if num_rows:
        assert timed == [True, True]
    else:
        assert not timed and torch.equal(gradient, torch.zeros(2, 16, 16).half())


@pytest.mark.interpreted
@pytest.mark.skipif(not kernels._HAS_GROUPED_MM, reason="a torch without grouped_mm")
def test_torchs_grouped_product_takes_what_it_is_given(monkeypatch):
    """Where it is one kernel; its CPU implementation checks shapes, layouts and results."""
    monkeypatch.setattr(kernels, "_grouped_mm_is_fused", lambda *tensors: True)
    args = make([8, 24, 24, 48], torch.bfloat16, "cpu", ((48, 16), (4, 16, 32), (48, 32)))
    check([kernels.rows_product], [kernels.weight_gradient], args, torch.bfloat16)


def test_experts_without_rows_have_zero_gradients_on_blackwell(device, monkeypatch):
    """grouped_mm leaves their part of the result unwritten there."""

    def leaves_unused(d_t, rows, offs):
        out = torch.full((len(offs), d_t.shape[0], rows.shape[1]), float("nan"), dtype=rows.dtype)
        out = out.to(rows.device)
        for expert, (begin, end) in enumerate(zip([0, *offs[:-1]], offs, strict=True)):
            if begin < end:
                out[expert] = d_t[:, begin:end] @ rows[begin:end]
        return out

    monkeypatch.setattr(kernels, "_grouped_mm_is_fused", lambda *tensors: True)
    monkeypatch.setattr(kernels, "_grouped_mm_skips_unused", lambda rows: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_unused, raising=False)
    for ends in ENDS.values():
        args = make(ends, torch.float32, device)
        check([], [kernels.weight_gradient], args, torch.float32)


def test_more_tiles_than_a_grids_second_dimension_may_have(monkeypatch):
    """2^23 rows in tiles of 16: all programs are in the first dimension."""
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **kw: grids.append(grid))
    # no torch.device("meta") here: torch remembers its constructors, which are poisoned
    rows, weight = (torch.empty(s, device="meta") for s in ((2**23, 8), (2, 8, 40)))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    monkeypatch.setattr(kernels, "check_tensor", lambda *args: None)
    kernels.rows_product(rows, weight, offsets)
    assert grids[0]({"BLOCK_R": 16, "BLOCK_C": 16}) == ((2**19 + 3) * 3,)
