"""Files written by Meta's own code load at any number of ranks."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.assertions import assert_same_state

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_for_rank

GOLDEN = Path(__file__).parents[1] / "golden"


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)["model"]


RUNS = [(1, "init", 1), (1, "final", 8), (2, "init", 4), (2, "final", 1), (2, "final", 2)]


@pytest.mark.parametrize(("ranks", "moment", "world_size"), RUNS)
def test_metas_files_load(ranks, moment, world_size):
    folder, experts = GOLDEN / f"top2_world{ranks}" / moment, {}  # by global number
    for rank in range(ranks):
        for key, tensor in read(folder / f"checkpoint_last-rank-{rank}.pt").items():
            head, expert, rest = re.fullmatch(r"(.*\.experts)\.(\d)\.(.*)", key).groups()
            experts[head, rank * (4 // ranks) + int(expert), rest] = tensor
    assert len(experts) == 2 * 4 * 4
    for rank in range(world_size):
        path = str(folder / "checkpoint_last.pt")
        state = load_for_rank(path, rank=rank, world_size=world_size)
        mine = [rank * 4 // world_size + j for j in range(4 // world_size)] or [rank % 4]
        expected = read(folder / "checkpoint_last-shared.pt")
        assert len(expected) == 64
        for (head, expert, rest), tensor in experts.items():
            if expert in mine:
                expected[f"{head}.{mine.index(expert)}.{rest}"] = tensor
        assert_same_state(state["model"], expected)
        assert state["cfg"]["model"]["moe_expert_count"] == 4
        assert state["optimizer_history"][-1]["num_updates"] == {"init": 1, "final": 20}[moment]
        assert "last_optimizer_state" not in state and state["moe_checkpoint"] is None


def test_inspect_counts_each_parameter_once():
    report = inspect(str(GOLDEN / "top2_world2" / "final" / "checkpoint_last.pt"))
    assert report["kind"] == "set" and report["consistent"] and report["num_experts"] == 4
    # 4 experts in 2 layers of 64x32 + 64 + 32x64 + 32
    assert report["params_expert"] == 2 * 4 * (2 * 64 * 32 + 64 + 32)
    # the output projection is the embedding under a second name: counted once
    dense = read(GOLDEN / "top2_world2/final/checkpoint_last-shared.pt")
    tied = dense.pop("decoder.output_projection.weight")
    assert torch.equal(tied, dense["decoder.embed_tokens.weight"])
    for mark in ("decoder.version", "decoder.embed_positions._float_tensor"):
        assert dense.pop(mark).numel() == 1  # of one element: fairseq's models tell their version
    assert report["params_dense"] == sum(tensor.numel() for tensor in dense.values())
    assert report["moe_layers"] == ["decoder.layers.1", "decoder.layers.3"]
    assert report["num_updates"] == 20 and report["optimizer_state"] == "none"


@pytest.mark.parametrize("lost", [0, 1])
def test_missing_file_is_found_by_the_gates(tmp_path, lost):
    """Meta's files say nowhere how many there are; the gates choose from 4 experts."""
    for file in (GOLDEN / "top2_world2" / "final").glob("*.pt"):
        if file.name != f"checkpoint_last-rank-{lost}.pt":
            shutil.copy(file, tmp_path)
    with pytest.raises(CheckpointError, match=f"1 of 2 rank files missing: .*rank-{lost}.pt"):
        load_for_rank(str(tmp_path / "checkpoint_last.pt"), rank=0, world_size=1)
