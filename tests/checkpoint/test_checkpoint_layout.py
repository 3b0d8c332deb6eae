"""Names of files and of experts."""

import pytest

from fairseq_tutel.checkpoint.layout import (
    CheckpointError,
    CheckpointSet,
    count_rank_files,
    experts_of_rank,
)


def test_names_of_fairseq_keep_their_dots_and_digits():
    # keep-best names have a dot and a metric; the stem ends in digits, not in a rank
    cset = CheckpointSet.from_path("checkpoint.best_loss_4.1230-rank-3.pt")
    assert cset.path == "checkpoint.best_loss_4.1230.pt"
    assert cset.role_of("checkpoint.best_loss_4.1230-rank-10.pt") == 10
    assert cset.role_of("checkpoint.best_loss_4.1230-shared.pt") == "shared"
    assert cset.role_of("checkpoint.best_loss_4.1230.pt") == "merged"
    assert cset.role_of("checkpoint.best_loss_4.12301-shared.pt") is None
    assert cset.role_of("checkpoint.best_loss_4.1230-rank-0.pt.0123456789abcdef.tmp") is None


def test_experts_of_rank_in_groups():
    held = [list(experts_of_rank(rank, 4, 6, 2)) for rank in range(4)]
    assert held == [[0, 1, 2], [3, 4, 5]] * 2
    assert count_rank_files(6, 4, 2) == 2
    for size in (3, 4):
        with pytest.raises(CheckpointError, match=f"={size} .* must divide the number of ranks, 4"):
            experts_of_rank(0, 4, 6, size)
