"""Flipped bits are found while loading, by the checksums that torch writes and does not read."""

import random
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Reference, expert_name
from helpers.assertions import assert_same_state
from helpers.sets import member

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_for_rank, merge, reshard
from fairseq_tutel.checkpoint.__main__ import main


def _flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(bytes(content))


def _position(path, tensor):
    """Where the data of a tensor begin in a file."""
    found = path.read_bytes().find(tensor.contiguous().numpy().tobytes())
    assert found > 0
    return found


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
        for _ in range(25):
            _flip(file, generator.randrange(len(whole)), 1 << generator.randrange(8))
            try:
                assert_same_state(load_for_rank(path, rank=0, world_size=1), expected)
            except CheckpointError as error:
                found += 1
                assert file.name in str(error)
            file.write_bytes(whole)
    assert found > 8


def test_a_flip_anywhere_in_the_zip_directory_is_found(tmp_path):
    path = tmp_path / "one.pt"
    torch.save(Reference(2, layers=(1,)).state([0, 1]), path)
    expected = load_for_rank(str(path), rank=0, world_size=1)
    whole = path.read_bytes()
    start = whole.find(b"PK\x01\x02")
    for number, position in enumerate(range(start, start + 160, 2)):  # data.pkl and what follows
        _flip(path, position, 1 << number % 8)
        try:
            assert_same_state(load_for_rank(str(path), rank=0, world_size=1), expected)
        except CheckpointError as error:
            assert path.name in str(error)
        path.write_bytes(whole)


def test_whoever_takes_the_tensor_finds_the_damage(tmp_path, monkeypatch, capsys):
    """And nobody else: what is not wanted is not read."""
    reference, path = Reference(4), str(tmp_path / "m.pt")
    reference.save(path, 2)
    file = Path(member(path, "rank-1"))
    weight = _position(file, reference.model[expert_name(3, 3, "fc2.weight")])
    moment = _position(file, reference.named[expert_name(3, 3, "fc2.weight")]["exp_avg_sq"])
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
    state = Reference(4).state([0, 1, 2, 3])
    path = tmp_path / "one.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    for _ in range(2):
        loaded = load_for_rank(str(path), rank=0, world_size=1)
        loaded.pop("moe_checkpoint")
        assert_same_state(loaded, state)
        assert inspect(str(path), verify=True)["consistent"]
        torch.save(state, path, _use_new_zipfile_serialization=False)
