"""Single files: what is refused or damaged; checksums, which torch writes and does not read."""

import collections
import errno
import io
import os
import random
import resource
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference, expert_name
from helpers.assertions import assert_same_state
from helpers.sets import member

from fairseq_tutel.checkpoint import (
    CheckpointError,
    inspect,
    load_file,
    load_for_rank,
    merge,
    reshard,
)
from fairseq_tutel.checkpoint.__main__ import main
from fairseq_tutel.checkpoint.io import save_file


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.pt")


def test_plain_containers_survive_saving(path):
    counts, flags = collections.defaultdict(list, a=[(1, 2.0), None]), {True, False}
    save_file({"model": {}, "counts": counts, "flags": flags}, path)
    assert_same_state(load_file(path), {"model": {}, "counts": dict(counts), "flags": flags})


def test_damaged_files_are_named(path, tmp_path):
    save_file({"model": {"w": torch.arange(1000.0)}}, str(tmp_path / "whole.pt"))
    content, lists = (tmp_path / "whole.pt").read_bytes(), io.BytesIO()
    torch.save([1, 2], lists)
    short = [content[:size] for size in (0, 1, 100, len(content) // 2, -1)]
    for data, message in (
        (None, "x.pt: cannot be read: No such file"),
        *((part, r"x.pt: is (truncated|not a checkpoint)") for part in short),
        (b"some text, not a checkpoint", "x.pt: is not a checkpoint or is damaged"),
        (lists.getvalue(), "holds a list, not a dict"),
    ):
        if data is not None:
            (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
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
    loaded["w"].zero_()
    assert torch.equal(load_file(path)["model"]["w"], stack[5])  # the file has not changed


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


def _flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("merged", [False, True], ids=["set", "merged"])
def test_a_flipped_bit_is_found_or_changes_nothing(merged, tmp_path):
    reference, path = Reference(4, layers=(1,)), str(tmp_path / "m.pt")
    reference.save(path, 2)
    if merged:
        merge(path, str(tmp_path / "one.pt"), with_optimizer=True)
        path = str(tmp_path / "one.pt")
    expected = load_for_rank(path, rank=0, world_size=1)
    generator, found = random.Random(7), 0
    for file in sorted(tmp_path.glob("one.pt" if merged else "m.pt*")):
        whole = file.read_bytes()
        positions = [generator.randrange(len(whole)) for _ in range(25)]
        if merged:  # the directory of the zip: data.pkl and what follows, and its ends
            start = whole.find(b"PK\x01\x02")
            positions += [*range(start, start + 160, 2), *range(len(whole) - 98, len(whole))]
        for number, position in enumerate(positions):
            _flip(file, position, 1 << number % 8)
            try:
                assert_same_state(load_for_rank(path, rank=0, world_size=1), expected)
            except CheckpointError as error:
                found += 1
                assert file.name in str(error)
            file.write_bytes(whole)
    assert found > 8


def test_whoever_takes_the_tensor_finds_the_damage(tmp_path, monkeypatch, capsys):
    """And nobody else: what is not wanted is not read."""
    reference, path = Reference(4), str(tmp_path / "m.pt")
    reference.save(path, 2)
    file, name = Path(member(path, "rank-1")), expert_name(3, 3, "fc2.weight")
    weight, moment = (  # where their data begin
        file.read_bytes().index(tensor.contiguous().numpy().tobytes())
        for tensor in (reference.model[name], reference.named[name]["exp_avg_sq"])
    )
    message = r"-rank-1.pt: is damaged: wrong checksum of decoder.layers.3.*fc2.weight"
    _flip(file, moment + 5)
    assert main(["inspect", path]) == 0
    assert main(["inspect", "--verify", path]) == 1
    assert "-rank-1.pt: is damaged: wrong checksum" in capsys.readouterr().out
    load_for_rank(path, rank=0, world_size=2)
    load_for_rank(path, rank=2, world_size=4)  # expert 2, of the same file
    weights = load_for_rank(path, rank=1, world_size=2, with_optimizer=False)
    assert "last_optimizer_state" not in weights
    for read in (
        lambda: load_for_rank(path, rank=1, world_size=2),
        lambda: reshard(path, str(tmp_path / "x.pt"), 4),
    ):
        with pytest.raises(CheckpointError, match=message):
            read()
    merge(path, str(tmp_path / "weights.pt"))
    _flip(file, moment + 5)
    _flip(file, weight + 5)
    for optimizer in (True, False):
        with pytest.raises(CheckpointError, match=message):
            load_for_rank(path, rank=1, world_size=2, with_optimizer=optimizer)
    monkeypatch.setenv("FAIRSEQ_TUTEL_CHECKSUMS", "0")
    load_for_rank(path, rank=1, world_size=2)


def test_files_without_checksums_load(tmp_path):
    """Written where torch was set to leave them out, or in its format before 1.6."""
    reference, path = Reference(4), tmp_path / "one.pt"
    write_checksums = getattr(torch.serialization, "set_crc32_options", bool)  # torch 2.6 and newer
    write_checksums(False)
    try:
        torch.save(reference.state([0, 1, 2, 3]), path)
    finally:
        write_checksums(True)
    for _ in range(2):
        reference.check_loadable(str(path))
        assert inspect(str(path), verify=True)["consistent"]
        torch.save(reference.state([0, 1, 2, 3]), path, _use_new_zipfile_serialization=False)
