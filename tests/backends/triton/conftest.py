"""Fixtures of the kernel tests: where they run, and poisoned memory."""

import pytest
import torch
from helpers.inputs import poison_fresh_memory

from fairseq_tutel.ops import backend

# Where triton cannot be installed, or comes with an older torch, nothing here can be tested.
collect_ignore_glob = ["*.py"] if backend._NO_TRITON else []


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """CPU in Triton's interpreter, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_fresh_memory(monkeypatch)
