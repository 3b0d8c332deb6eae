"""Names of files and of experts."""

import pytest
import torch
from checkpoint_helpers import expert_range

from fairseq_tutel.checkpoint.layout import (
    CheckpointError,
    CheckpointSet,
    count_rank_files,
    expert_forms,
    experts_of_rank,
    gate_experts,
    select_experts,
)


def test_any_member_names_the_set_and_other_names_are_refused():
    for member in ("", "-shared", "-rank-12"):
        cset = CheckpointSet.from_path(f"d/checkpoint_best{member}.pt")
        assert cset.path == "d/checkpoint_best.pt"
        assert cset.path_of("shared") == "d/checkpoint_best-shared.pt"
        assert cset.path_of(12) == "d/checkpoint_best-rank-12.pt"
    for path in ("d/model.bin", "d/.pt", "d/"):
        with pytest.raises(CheckpointError, match="expected NAME.pt"):
            CheckpointSet.from_path(path)


def test_names_of_fairseq_keep_their_dots_and_digits():
    # keep-best names have a dot and a metric; the stem ends in digits, not in a rank
    cset = CheckpointSet.from_path("checkpoint.best_loss_4.1230-rank-3.pt")
    assert cset.path == "checkpoint.best_loss_4.1230.pt"
    assert cset.role_of("checkpoint.best_loss_4.1230-rank-10.pt") == 10
    assert cset.role_of("checkpoint.best_loss_4.1230-shared.pt") == "shared"
    assert cset.role_of("checkpoint.best_loss_4.1230.pt") == "merged"
    assert cset.role_of("checkpoint.best_loss_4.12301-shared.pt") is None
    assert cset.role_of("checkpoint.best_loss_4.1230-rank-0.pt.0123456789abcdef.tmp") is None


@pytest.mark.parametrize("num_experts", [1, 2, 4, 8])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_experts_of_rank_against_definition(num_experts, world_size):
    for rank in range(world_size):
        expected = expert_range(rank, world_size, num_experts)
        assert list(experts_of_rank(rank, world_size, num_experts)) == expected
    assert count_rank_files(num_experts, world_size) == min(num_experts, world_size)


def test_experts_of_rank_in_groups():
    """6 experts, 4 ranks, every 2 of which hold all."""
    held = [list(experts_of_rank(rank, 4, 6, 2)) for rank in range(4)]
    assert held == [[0, 1, 2], [3, 4, 5]] * 2
    assert count_rank_files(6, 4, 2) == 2
    for size in (3, 4):
        with pytest.raises(CheckpointError, match=f"={size} .* must divide the number of ranks, 4"):
            experts_of_rank(0, 4, 6, size)


def test_slices_hold_every_expert_once_and_need_no_tensors():
    whole = {f"l.{layer}.experts.{x}.w": (layer, x) for layer in (0, 11) for x in range(6)}
    parts = [select_experts(whole, first=0, wanted=range(r * 2, r * 2 + 2)) for r in range(3)]
    assert parts[2] == {
        "l.0.experts.0.w": (0, 4), "l.0.experts.1.w": (0, 5),
        "l.11.experts.0.w": (11, 4), "l.11.experts.1.w": (11, 5),
    }  # fmt: skip
    assert sorted(value for part in parts for value in part.values()) == sorted(whole.values())
    # a part that starts at global expert 4 gives the same experts
    fifth = {"l.0.experts.0.w": (0, 5), "l.11.experts.0.w": (11, 5)}
    assert select_experts(parts[2], first=4, wanted=range(5, 6)) == fifth


def test_expert_forms_finds_gaps_and_differences():
    good = {"experts.0.w": torch.zeros(2), "experts.1.w": torch.zeros(2)}
    assert expert_forms(good, "f") == (2, {"experts.*.w": "[2] float32"})
    named = {"experts.0.w": {"b": 1, "a": 2}}
    assert expert_forms(named, "f") == (1, {"experts.*.w": "['a', 'b']"})
    assert expert_forms({}, "f") == (0, {})
    for more, message in (
        ({"experts.3.w": torch.zeros(2)}, r"f: has experts \[0, 1, 3\] but lacks \[2\]"),
        ({"experts.1.w": torch.zeros(3)}, r"f: expert 1 .*\[3\] float32 against \[2\] float32"),
        ({"experts.1.b": torch.zeros(3)}, "experts.*.b: .*against absent"),
        ({"w": torch.zeros(3)}, "f: 'w' is not of an expert"),
    ):
        with pytest.raises(CheckpointError, match=message):
            expert_forms(good | more, "f")


def test_gate_rows_give_the_number_of_experts():
    keys = ["x.1.moe_layer.experts.0.w", "x.3.moe_layer.experts.0.w"]
    gates = {f"x.{i}.moe_layer.gate.wg.weight": torch.zeros(4, 2) for i in (1, 3)}
    assert gate_experts(gates, keys) == 4
    assert gate_experts(gates, keys, null_experts=1) == 3
    assert gate_experts({}, keys) is None
    gates["x.3.moe_layer.gate.wg.weight"] = torch.zeros(8, 2)
    with pytest.raises(CheckpointError, match="differ in their number of experts"):
        gate_experts(gates, keys)
