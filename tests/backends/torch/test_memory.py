"""Large buffers of the torch backend: on huge pages where the system has them, and used again."""

import os
import signal
from pathlib import Path

import pytest
import torch

from fairseq_tutel import ops
from fairseq_tutel.backends.torch import _memory
from fairseq_tutel.backends.torch._memory import empty

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LIKE, NUMEL = torch.zeros(1), 16 << 20  # 64 MiB


def kept():
    return [len(buffer) for buffer in _memory._buffers]


@pytest.fixture(autouse=True)
def nothing_kept():
    _memory._buffers.clear()
    yield
    _memory._buffers.clear()


def asks_for_huge_pages(tensor):
    """Read the kernel's flags of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # the first line of a mapping: addresses ... path
            begin, end = (int(address, 16) for address in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    return False


@pytest.mark.skipif(not _SETTING.exists(), reason="the system has none")
def test_a_large_buffer_asks_for_huge_pages():
    buffer = empty(LIKE, (NUMEL,)).fill_(1.0)
    assert asks_for_huge_pages(buffer)
    assert buffer.shape == (NUMEL,) and bool((buffer == 1.0).all())
    small = empty(LIKE, (3, 0), torch.float64)
    assert small.shape == (3, 0) and small.dtype == torch.float64 and len(kept()) == 1


def test_a_buffer_is_used_again_once_no_tensor_lies_in_it():
    first = empty(LIKE, (4, NUMEL // 4))
    where, view = first.data_ptr(), first[1].detach()
    del first
    second = empty(LIKE, (NUMEL,))
    assert second.data_ptr() != where  # the view lies there still
    view.fill_(1.0), second.fill_(2.0)
    assert bool((view == 1.0).all())
    del view
    fewer = empty(LIKE, (NUMEL // 16 * 15,), torch.float32)
    assert fewer.data_ptr() == where and fewer.shape == (NUMEL // 16 * 15,)
    del fewer
    half = empty(LIKE, (NUMEL,), torch.float16)  # idle buffers of other sizes are given back
    assert half.dtype == torch.float16 and kept() == [4 * NUMEL, 2 * NUMEL]


def test_a_gradient_is_in_use_until_it_is_cleared():
    """16 experts of 512/1024: each weight has 32 MiB. A step touches no new page for gradients."""
    torch.manual_seed(0)
    shapes = (16, 1024, 512), (16, 1024), (16, 512, 1024), (16, 512)
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    weights, rows = params[::2], torch.randn(16, 2, 512)
    places, values = [], []
    for _ in range(3):
        ops.expert_ffn(rows, *params, activation="relu").square().sum().backward()
        places.append([weight.grad.data_ptr() for weight in weights])
        values.append([weight.grad.clone() for weight in weights])
        for weight in weights:
            weight.grad = None
    assert places[0] == places[1] == places[2] and len(set(places[0])) == 2
    assert all(torch.equal(a, b) for step in values for a, b in zip(step, values[0], strict=True))
    # accumulated, the first gradient must stay
    for _ in range(2):
        ops.expert_ffn(rows, *params, activation="relu").square().sum().backward()
    for weight, once in zip(weights, values[0], strict=True):
        torch.testing.assert_close(weight.grad, 2 * once)


def status_in_a_fork(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_neither_waits_for_a_thread_nor_shares_memory():
    mine = empty(LIKE, (NUMEL,)).fill_(1.0)
    with _memory._lock:  # as a thread that allocates holds it
        assert status_in_a_fork(lambda: empty(LIKE, (NUMEL,))) == 0
    assert status_in_a_fork(lambda: mine[0].fill_(2.0)) == 0
    assert mine[0] == 1.0
