"""Single files: what is refused, what is damaged; code in files: test_reading.py of fairseq's."""

import collections
import errno
import os
import resource

import pytest
import torch
from helpers.assertions import assert_same_state

from fairseq_tutel.checkpoint import CheckpointError, load_file
from fairseq_tutel.checkpoint.io import save_file


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.pt")


def test_plain_containers_survive_saving(path):
    counts = collections.defaultdict(list, a=[(1, 2.0), None])
    save_file({"model": {}, "counts": counts, "flags": {True, False}}, path)
    assert_same_state(
        load_file(path), {"model": {}, "counts": dict(counts), "flags": {True, False}}
    )


def test_damaged_files_are_named(path, tmp_path):
    with pytest.raises(CheckpointError, match="x.pt: cannot be read: No such file"):
        load_file(path)
    save_file({"model": {"w": torch.arange(1000.0)}}, path)
    content = (tmp_path / "x.pt").read_bytes()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "x.pt").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"x.pt: is (truncated|not a checkpoint)"):
            load_file(path)
    (tmp_path / "x.pt").write_bytes(b"some text, not a checkpoint")
    with pytest.raises(CheckpointError, match="x.pt: is not a checkpoint or is damaged"):
        load_file(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, not a dict"):
        load_file(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_file(str(tmp_path))


def test_file_replaced_between_torchs_two_openings(path, tmp_path, monkeypatch):
    """torch.load reads the pickle, then opens the file again to map it: never mix two files."""
    load = torch.load
    save_file({"model": {"w": torch.ones(100)}}, path)

    def load_while_replaced(*args, **kwargs):
        state = load(*args, **kwargs)
        torch.save({"model": {"w": torch.zeros(100)}}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
        return state

    monkeypatch.setattr(torch, "load", load_while_replaced)
    with pytest.raises(CheckpointError, match="x.pt: was replaced while it was being read"):
        load_file(path)


def test_a_slice_does_not_drag_its_stack_into_the_file(path):
    stack = torch.randn(64, 1000)
    tied = torch.randn(1000, 3).t()  # not contiguous
    state = {"model": {"w": stack[5], "a": tied, "b": tied, "p": torch.nn.Parameter(stack[6])}}
    save_file(state, path)
    assert os.path.getsize(path) < 4 * (2 * 1000 + 3000) + 5000
    loaded = load_file(path)["model"]
    assert torch.equal(loaded["w"], stack[5]) and torch.equal(loaded["p"], stack[6])
    assert type(loaded["p"]) is torch.Tensor
    assert torch.equal(loaded["a"], tied) and loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_loaded_tensors_may_be_changed_without_changing_the_file(path):
    save_file({"model": {"w": torch.ones(3000)}}, path)
    load_file(path)["model"]["w"].zero_()
    assert torch.equal(load_file(path)["model"]["w"], torch.ones(3000))


@pytest.mark.parametrize("size", [100_000, 1_000_000], ids=["by its last bytes", "by far"])
def test_a_full_disk_is_told_with_the_name_of_the_file(size, path):
    """As a limit on the size of files; torch's writer has words of its own for what follows."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_file({"x": torch.zeros(size, dtype=torch.uint8)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, path)
