"""An error that memory ran out, of this host's allocator: consumers and what helps in a line."""

import pytest
import torch

from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training import explain_out_of_memory
from fairseq_tutel.training.out_of_memory import is_out_of_memory, memory_held


def test_the_error_names_consumers_and_what_helps():
    model = torch.nn.Sequential(MoELayer(64, 4, hidden_dim=512, seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    weights = sum(param.nbytes for param in model.parameters())
    held = memory_held(model.parameters(), optimizer)
    assert held["weights"] == held["gradients"] == weights
    assert 2 * weights < held["optimizer state"] < 2 * weights + 100
    message = (
        r"out of memory \(it tried to allocate 4,194,304\.0 GiB\): the largest are optimizer state "
        r"2\.0 MiB, weights 1\.0 MiB, gradients 1\.0 MiB; what helps: "
        r".*checkpoint.*; .*='lean'.*; .*slices .*; .*shard"
    )
    explained = explain_out_of_memory(model, optimizer)
    with pytest.raises(torch.OutOfMemoryError, match=message) as raised, explained:
        torch.empty(2**52, dtype=torch.uint8)
    assert "\n" not in str(raised.value) and "allocator" in str(raised.value.__cause__).lower()


def test_copies_that_an_optimizer_steps_are_counted():
    model = torch.nn.Linear(4, 4, bias=False).half()
    copy = torch.nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.SGD([copy], lr=0.1)
    assert memory_held(model.parameters(), optimizer) == {"weights": 32, "fp32 copies": 64}


def test_other_errors_pass():
    explained = explain_out_of_memory(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explained:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("out of memory"))
