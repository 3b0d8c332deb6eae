"""Fixtures of the kernel tests: where they run, and poisoned memory."""

import pytest
import torch

from fairseq_tutel.ops import backend

# Where triton cannot be installed, or comes with an older torch, nothing here can be tested.
collect_ignore_glob = ["*.py"] if backend._NO_TRITON else []

# What an element holds that a kernel forgot to write.
POISON_INT = 0x5A5A5A5A


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """CPU in Triton's interpreter, and the GPU where there is one."""
    return torch.device(request.param)


def _poison(tensor):
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    info = None if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype)
    return tensor.fill_(True if info is None else min(POISON_INT, info.max))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is NaN (or a large integer), so that an element nobody writes shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, _original=original, **kw: _poison(_original(*args, **kw))
        )
