"""Comparison by RMS error ratio, which is 1 for zeros in place of a result of any size."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Largest tolerated error by dtype: a few roundings of results that are rounded once.
RATIO = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rms_ratio(got: Tensor, want: Tensor) -> float:
    """RMS of the error over the RMS of the expected values; plain RMS where those are all 0."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error, scale = (got - want).square().mean().sqrt(), want.square().mean().sqrt()
    return (error / scale if scale > 0 else error).item()


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Shapes are equal and the RMS error ratio is within the dtype's rounding; NaN fails."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return
    ratio = rms_ratio(got, want)
    assert ratio <= RATIO[dtype], f"{name}: RMS error ratio {ratio:.3g} over {RATIO[dtype]:.3g}"


def assert_tensors_close(got: Mapping, want: Mapping, limit: float) -> None:
    """Tensors of the same names, whose RMS error ratios are within the limit."""
    assert got.keys() == want.keys()
    ratios = {name: rms_ratio(got[name], want[name]) for name in want}
    assert all(ratio <= limit for ratio in ratios.values()), ratios


def assert_same_state(got, want, where=""):
    """Two state dicts, or trees of dicts and lists, have the same names and, to the bit, the same
    values."""
    if isinstance(want, Mapping):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_same_state(got[key], want[key], f"{where}/{key}")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want), where
        for number, pair in enumerate(zip(got, want, strict=True)):
            assert_same_state(*pair, f"{where}/{number}")
    elif torch.is_tensor(want):
        assert got.dtype == want.dtype and torch.equal(got, want), where
    else:
        assert got == want, where
