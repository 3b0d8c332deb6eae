"""The choice of tiles and implementations: what is timed, when, and what is kept."""

import math

import pytest
import torch
import triton

from fairseq_tutel.backends.triton import _autotune as tiles

FITTING = ["512", "64"]  # widths of the tiles below that rows of 512 numbers fill


class Kernel:
    """Notes the width of the tile of each launch, those that are timed too."""

    def __init__(self):
        self.widths, self.__name__ = [], "kernel"

    def __getitem__(self, grid):
        return lambda **given: self.widths.append(str(given["BLOCK_M"]))

    def launch(self, rows, sizes=(2048, 512, 64), **given):
        """Widths of the tiles of one launch."""
        self.widths.clear()
        free = tuple({"BLOCK_M": size, "num_warps": 8} for size in sizes)
        kernel = tiles.Tuned(self, free, tiles.narrow_tiles, ("M",))
        tiles.launch(kernel, (3,), rows, torch.bfloat16, M=512, **given)
        return list(self.widths)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch, tmp_path):
    """What torch says of a GPU, also without one; nothing is known of earlier timings."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tiles, "_fastest", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "1")
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)


@pytest.fixture
def timed(monkeypatch):
    """Names of the candidates that were timed; the narrowest tile is the fastest."""
    names, times = [], {"slow": 2.0, "fast": 1.0, "too large": math.inf, "512": 2.0, "64": 1.0}

    def milliseconds(candidate):
        returned = candidate()
        names.append(kernel.widths[-1] if returned is None else returned)
        return times[names[-1]]

    kernel = milliseconds.kernel = Kernel()
    monkeypatch.setattr(tiles, "_milliseconds", milliseconds)
    return names, kernel


def test_only_large_work_is_tuned(timed):
    """The first launch may be one of a few tokens, on which all tiles measure the same."""
    names, kernel = timed
    assert kernel.launch(tiles.TUNE_ROWS - 1) == ["512"] and not names
    assert kernel.launch(tiles.TUNE_ROWS) == [*FITTING, "64"]
    assert kernel.launch(tiles.TUNE_ROWS) == ["64"] and kernel.launch(1) == ["512"]
    assert kernel.launch(tiles.TUNE_ROWS, sizes=(512,)) == ["512"]  # nothing to choose from
    assert kernel.launch(1, sizes=(2048,)) == ["2048"]  # none is narrow enough
    assert names == FITTING
    # what a kernel does without an argument takes another time
    assert kernel.launch(tiles.TUNE_ROWS, weight_ptr=None) == [*FITTING, "64"]
    assert kernel.launch(tiles.TUNE_ROWS, weight_ptr=1) == [*FITTING, "64"]


@pytest.mark.parametrize("why", ["a graph is captured", "tuning is off"])
def test_nothing_is_timed_where_it_may_not(why, timed, monkeypatch):
    """The next work outside of it is tuned."""
    names, kernel = timed
    if why == "tuning is off":
        monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "0")
    else:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        assert kernel.launch(tiles.TUNE_ROWS) == ["512"]
        assert tiles.fastest("a", True, [lambda: "slow", lambda: "fast"]) == "slow" and not names
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernel.launch(tiles.TUNE_ROWS)[-1] == "64"
    assert tiles.fastest("a", True, [lambda: "slow", lambda: "fast"]) == "fast"


def test_a_timing_that_finds_no_memory_ends_nothing(monkeypatch, tmp_path):
    """Triton takes 256 MB to time. Work goes on with the first choice, which is not kept."""

    def no_memory(*args, **given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton.testing, "do_bench", no_memory)
    assert Kernel().launch(tiles.TUNE_ROWS) == ["512"]
    assert tiles.fastest("key", True, [lambda: "first", lambda: "second"]) == "first"
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("kept", [None, "1", "0"])
def test_times_are_kept_on_disk_unless_triton_is_told_not_to(kept, timed, monkeypatch, tmp_path):
    """TRITON_CACHE_AUTOTUNING=0 neither writes nor reads them: they may be those of a busy GPU."""

    def times_in_a_process(kept):
        if kept is not None:
            monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", kept)
        monkeypatch.setattr(tiles, "_fastest", {})
        tiles.fastest("key", True, [lambda: "slow", lambda: "fast"])
        return len(timed[0])

    keeps = kept != "0"
    assert times_in_a_process(kept) == 2 and len(list(tmp_path.rglob("*.json"))) == keeps
    assert times_in_a_process("1") == (2 if keeps else 4)
    assert times_in_a_process(kept) == (2 if keeps else 6)


def test_the_fastest_implementation_is_kept(timed, monkeypatch):
    names, _ = timed
    candidates = [lambda: "slow", lambda: "too large", lambda: "fast"]
    assert tiles.fastest("a", False, candidates) == "slow" and not names  # little work
    assert tiles.fastest("a", True, candidates[:1]) == "slow" and not names  # no choice
    assert [tiles.fastest("a", True, candidates) for _ in range(2)] == ["fast", "fast"]
    assert names == ["slow", "too large", "fast"]
    monkeypatch.setattr(tiles, "_fastest", {})  # another process
    assert tiles.fastest("a", True, candidates) == "fast" and len(names) == 3
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    monkeypatch.setattr(tiles, "_fastest", {})
    assert tiles.fastest("a", True, candidates) == "fast" and len(names) == 6
