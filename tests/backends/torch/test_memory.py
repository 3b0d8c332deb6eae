"""Large buffers of the torch backend are on huge pages, where the system has them."""

import resource
from pathlib import Path

import pytest
import torch

from fairseq_tutel.backends.torch._memory import empty

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="the system has none"
)
def test_a_large_buffer_is_touched_in_few_faults():
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    like, size = torch.zeros(1), 64 << 20
    before = faults()
    buffer = empty(like, (size // 4,)).fill_(1.0)
    assert faults() - before < size // 4096 // 8
    assert buffer.shape == (size // 4,) and bool((buffer == 1.0).all())
    small = empty(like, (3, 0), torch.float64)
    assert small.shape == (3, 0) and small.dtype == torch.float64
