"""Seeds of dropout."""

import pytest
import torch

from fairseq_tutel.ops.expert_ffn import dropout_seed


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**53 + 1, -(2**63), 2**63 - 1])
def test_every_int64_is_a_seed(seed):
    tensor = dropout_seed(0.1, seed, torch.device("cpu"))
    assert tensor.dtype == torch.int64 and tensor.shape == () and tensor.item() == seed


def test_seeds_are_made_where_they_are_needed(monkeypatch):
    """torch.tensor(seed, device=...) would wait: it copies from pageable memory to a GPU."""
    cpu, given = torch.device("cpu"), torch.tensor(3)
    monkeypatch.setattr(torch, "tensor", None)
    assert dropout_seed(0.1, 7, cpu).item() == 7
    assert dropout_seed(0.1, given, cpu) is given and dropout_seed(0.0, 3, cpu) is None
