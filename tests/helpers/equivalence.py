"""Several ranks against one rank that sees the same batches: what was trained must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.assertions import rms_ratio

from fairseq_tutel.distributed import take_slice


def assert_equal_tensors(
    what: str, got: dict, want: dict, ratio: float, slices: tuple[int, int] = (0, 1)
) -> None:
    """Tensors by name; of an expert ``got`` has one of ``slices`` (number, how many)."""
    assert got, what
    for name, value in got.items():
        expected = want[name]
        if ".experts." in name:
            kind = name.rsplit(".", 1)[1].split("[")[0].replace("_", ".")
            expected = take_slice(expected, kind, *slices)
        # rounding is all there is in its gradient, and Adam amplifies that
        if not name.endswith("k_proj.bias"):
            assert value.shape == expected.shape, name
            assert rms_ratio(value, expected) < ratio, f"{what} of {name}"


def assert_trained_like_one(
    one: tuple[Any, ...], ranks: Sequence[tuple[Any, ...]], sliced_experts: int = 0
) -> None:
    """(updates, gradients of some of them, weights at the end) of one rank, and of each of several.

    ``sliced_experts``: their number, where each is spread over as many ranks as there are for it.
    """
    updates, grads, weights = one
    seen = set()
    for rank, (got_updates, got_grads, got_weights) in enumerate(ranks):
        slices = (0, 1)
        if 0 < sliced_experts < len(ranks):
            slices = (rank // sliced_experts, len(ranks) // sliced_experts)
        for got, want in zip(got_updates, updates, strict=True):
            assert got.sample_size == want.sample_size
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
            for key, value in want.sums.items():
                assert got.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
        for got, want in zip(got_grads, grads, strict=True):
            assert_equal_tensors("gradient", got, want, 1e-4, slices)
        assert_equal_tensors("weight", got_weights, weights, 1e-4, slices)
        seen |= set(got_weights)
    assert seen == set(weights)  # every expert is somewhere
