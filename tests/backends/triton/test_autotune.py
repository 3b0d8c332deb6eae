"""The choice of tiles: what is tuned, pinned lists, and the fastest implementation."""

import math

import pytest
import torch
import triton

from fairseq_tutel.backends.triton import _autotune as tiles


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """What torch says of a GPU, also without one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class _Kernel:
    """Records how it is launched, tuned or not."""

    def __init__(self, configs):
        self.configs, self.calls, self.fn, self.keys = configs, [], self, ["M"]
        self.best_config = configs[-1]

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


def test_small_work_is_not_tuned():
    """The first launch may be one of a few tokens, on which all tiles measure the same."""
    configs = [triton.Config({"BLOCK_T": 1, "BLOCK_M": b}, num_warps=8) for b in (2048, 512, 64)]
    kernel, half = _Kernel(configs), torch.bfloat16
    tiles.launch(kernel, (3,), tiles.TUNE_ROWS - 1, half, "x", M=512)
    tiles.launch(kernel, (3,), tiles.TUNE_ROWS, half, "x", M=512)
    (_, args, small), (_, _, large) = kernel.calls
    assert args == ("x",) and small["BLOCK_M"] == 512 and small["num_warps"] == 8
    assert large == {"M": 512}
    tiles.launch(
        kernel, (3,), tiles.TUNE_ROWS, half, "x", M=512
    )  # tuned: the autotuner is not asked
    assert kernel.calls[-1][2] == {"M": 512, **configs[-1].all_kwargs()}
    kernel = _Kernel(configs[:1])  # pinned: nothing to tune
    tiles.launch(kernel, (3,), 1, half, "x", M=512)
    assert kernel.calls == [((3,), ("x",), {"M": 512, **configs[0].all_kwargs()})]


def test_nothing_is_tuned_in_a_graph(monkeypatch):
    """Nothing can be timed while one is captured; the next launch outside of it is tuned."""
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    kernel = _Kernel([triton.Config({"BLOCK_M": size}) for size in (2048, 512, 64)])
    for _ in range(2):
        tiles.launch(kernel, (3,), tiles.TUNE_ROWS, torch.bfloat16, M=512)
    assert [given["BLOCK_M"] for _, _, given in kernel.calls] == [512, 512]
    capturing[0] = False
    tiles.launch(kernel, (3,), tiles.TUNE_ROWS, torch.bfloat16, M=512)
    assert kernel.calls[-1][2] == {"M": 512}


def test_a_timing_that_finds_no_memory_ends_nothing(monkeypatch, tmp_path):
    """Triton takes 256 MB to time. Work goes on with the first choice, which is not kept."""

    def no_memory(*args, **given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel = _Kernel([triton.Config({"BLOCK_M": size}) for size in (2048, 512, 64)])
    monkeypatch.setattr(_Kernel, "__getitem__", lambda self, grid: no_memory)
    kernel.fn = {(3,): lambda **given: kernel.calls.append(given["BLOCK_M"])}
    for _ in range(2):
        tiles.launch(kernel, (3,), tiles.TUNE_ROWS, torch.bfloat16, M=512)
    assert kernel.calls == [512, 512]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.testing, "do_bench", no_memory)
    monkeypatch.setattr(tiles, "_fastest", {})
    assert tiles.fastest("key", True, [lambda: "first", lambda: "second"]) == "first"
    assert not list(tmp_path.rglob("*.json"))


def test_nothing_is_tuned_where_tuning_is_off(monkeypatch):
    """Also if the environment changes after the import; all work takes the first tile that fits."""
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "0")
    kernel = _Kernel([triton.Config({"BLOCK_M": size}) for size in (2048, 512, 64)])
    for rows in (1, tiles.TUNE_ROWS):
        tiles.launch(kernel, (3,), rows, torch.bfloat16, M=512)
    assert [given["BLOCK_M"] for _, _, given in kernel.calls] == [512, 512]
    assert tiles.fastest("key", True, [lambda: "first", lambda: "second"]) == "first"


@pytest.mark.parametrize("kept", [None, "1", "0"])
def test_times_are_kept_on_disk_unless_triton_is_told_not_to(kept, monkeypatch, tmp_path):
    """TRITON_CACHE_AUTOTUNING=0 neither writes nor reads them: they may be those of a busy GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "1")
    monkeypatch.setattr(tiles, "_milliseconds", lambda candidate: timed.append(0) or len(timed))
    timed = []

    def times_in_a_process(kept):
        monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
        if kept is not None:
            monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", kept)
        monkeypatch.setattr(tiles, "_fastest", {})
        tiles.fastest("key", True, [lambda: "first", lambda: "second"])
        return len(timed)

    keeps = kept != "0"
    assert times_in_a_process(kept) == 2 and len(list(tmp_path.rglob("*.json"))) == keeps
    assert tiles.tuning([], None)["cache_results"] == keeps
    assert times_in_a_process("1") == (2 if keeps else 4)
    assert times_in_a_process(kept) == (2 if keeps else 6)


def test_the_fastest_implementation_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    timed = []

    def milliseconds(candidate):
        timed.append(candidate())
        return {"slow": 2.0, "fast": 1.0, "too large": math.inf}[timed[-1]]

    monkeypatch.setattr(tiles, "_milliseconds", milliseconds)
    monkeypatch.setattr(tiles, "_fastest", {})
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "1")
    candidates = [lambda: "slow", lambda: "too large", lambda: "fast"]
    assert tiles.fastest("a", True, candidates) == "slow"  # in a graph nothing is timed
    capturing[0] = False
    assert tiles.fastest("a", False, candidates) == "slow" and not timed  # little work
    assert tiles.fastest("a", True, candidates[:1]) == "slow" and not timed  # no choice
    assert [tiles.fastest("a", True, candidates) for _ in range(2)] == ["fast", "fast"]
    assert timed == ["slow", "too large", "fast"]
    monkeypatch.setattr(tiles, "_fastest", {})  # another process
    assert tiles.fastest("a", True, candidates) == "fast" and len(timed) == 3
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    monkeypatch.setattr(tiles, "_fastest", {})
    assert tiles.fastest("a", True, candidates) == "fast" and len(timed) == 6
