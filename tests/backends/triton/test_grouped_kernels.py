"""Products of ragged rows: which implementation computes them, and with what precision."""

import contextlib
from functools import partial

import pytest
import torch
from test_kernels import ENDS, check, gathered, products

from fairseq_tutel.backends.triton import _grouped as kernels

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
def test_which_implementations_compete(monkeypatch):
    """Hopper's: TMA for fp16 and few rows, grouped_mm for bf16, the kernel for all the rest."""
    tried, guarded = [], []

    @contextlib.contextmanager
    def guard(tensor):
        guarded.append(tensor)
        yield
        guarded.pop()

    def fastest(key, tune, candidates):
        assert guarded  # timed on the GPU of the tensors, which may not be the current one
        tried.append((tune, [candidate() for candidate in candidates]))

    def tiles(few_rows=False, gathers_sum=False):
        return ("few",) if few_rows else ("many",)

    patched = {
        "has_tma": lambda device: True, "tma_tiles": tiles, "_HAS_GROUPED_MM": True,
        "rows_product_tma": lambda *given: given[-1], "_rows_product": lambda *given: "every GPU",
        "weight_gradient_tma": lambda *given: given[-2], "device_guard": guard, "fastest": fastest,
    }  # fmt: skip
    for name, value in patched.items():
        monkeypatch.setattr(kernels, name, value)
    grouped_mm = lambda *args, offs: "torch"  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm, raising=False)
    offsets, half, brain = torch.tensor([1, 2], dtype=torch.int32), torch.float16, torch.bfloat16

    def chosen(dtype, num_rows, width=16, start=0, source=None):
        rows = torch.empty(num_rows * width + start, dtype=dtype)[start:].view(num_rows, width)
        weight = torch.empty((2, width, 8), dtype=dtype)
        return kernels.rows_product(rows, weight, offsets, source) or tried.pop()

    source = kernels.Source(torch.zeros(kernels.TUNE_ROWS, dtype=torch.int32), 2)
    assert chosen(half, 2 * kernels.FEW_ROWS) == (True, ["few"])
    assert chosen(half, 2 * kernels.FEW_ROWS + 1) == (False, ["many"])
    assert chosen(half, kernels.TUNE_ROWS) == (True, ["many"])
    assert chosen(brain, 8) == (True, ["torch", "few"])
    assert chosen(brain, kernels.TUNE_ROWS) == (True, ["torch"])
    # torch's writes the rows first: the fastest of both is found by measuring
    assert chosen(brain, 8, source=source) == (True, ["many", "torch"])
    assert chosen(half, 8, source=source) == (True, ["many"])
    assert chosen(torch.float32, 8) == "every GPU"
    assert chosen(half, 8, width=12) == "every GPU"  # rows of 24 bytes
    assert chosen(brain, 8, start=1) == "every GPU"  # a view of a flat buffer
    rows, none = torch.empty(8, 16, dtype=half), torch.empty(0, 16, dtype=half)
    assert (kernels.weight_gradient(rows, rows, offsets) or tried.pop()) == (True, ["many"])
    # without rows there is nothing to time or to keep
    assert kernels.rows_product(none, rows.view(2, 16, 4), offsets).shape == (0, 4)
    assert torch.equal(kernels.weight_gradient(none, none, offsets), rows.new_zeros(2, 16, 16))
    assert not tried


@pytest.mark.interpreted
@pytest.mark.skipif(not kernels._HAS_GROUPED_MM, reason="a torch without grouped_mm")
def test_torchs_grouped_product_takes_what_it_is_given(monkeypatch):
    """Where it is one kernel; its CPU implementation checks shapes, layouts and results."""
    monkeypatch.setattr(kernels, "_reads_by_tma", lambda *tensors: True)
    monkeypatch.setattr(kernels, "tma_tiles", lambda *few, **gathers: ())
    ways = [(kernels.rows_product, kernels.weight_gradient)]
    check(*products(ways, "cpu", torch.bfloat16, [8, 24, 24, 48], 16, 32))
    check(*gathered(ways, "cpu", torch.bfloat16))


def test_experts_without_rows_have_zero_gradients_on_blackwell(device, monkeypatch):
    """grouped_mm leaves their part of the result unwritten there."""

    def leaves_unused(d_t, rows, offs):
        out = torch.full((len(offs), d_t.shape[0], rows.shape[1]), float("nan"), dtype=rows.dtype)
        out = out.to(rows.device)
        for expert, (begin, end) in enumerate(zip([0, *offs[:-1]], offs, strict=True)):
            if begin < end:
                out[expert] = d_t[:, begin:end] @ rows[begin:end]
        return out

    monkeypatch.setattr(kernels, "_reads_by_tma", lambda *tensors: True)
    monkeypatch.setattr(kernels, "tma_tiles", lambda *few, **gathers: ())
    monkeypatch.setattr(kernels, "_grouped_mm_skips_unused", lambda rows: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_unused, raising=False)
    for ends in ENDS:
        ways = [(partial(kernels._rows_product, source=None), kernels.weight_gradient)]
        check(*products(ways, device, torch.bfloat16, ends, 33, 20))


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
