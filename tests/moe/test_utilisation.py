"""Utilisation of the experts: counts by rank."""

from types import SimpleNamespace

import pytest
import torch

from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.moe import RoutingCounts, routing_counts, utilisation

_SLICED = ExpertParallelGroups(4, 5, 8, 4, 2, simulated=True, placement="sliced")


@pytest.mark.parametrize(
    "groups, r, columns",
    [
        (ExpertParallelGroups(4), 1, [[0, 1, 2, 3]]),
        (ExpertParallelGroups(4, 1, 2, 2), 1, [[0, 1], [2, 3]]),
        # rank 3 of 4 exchanges with rank 2 only: two replicas of every expert
        (ExpertParallelGroups(4, 3, 4, 2, 2), 1, [[], [], [0, 1], [2, 3]]),
        # two slices of every expert: to one of them, to both, or none leaves rank 5
        (_SLICED, 1, [[], [], [], [], [0], [1], [2], [3]]),
        (_SLICED, 2, [[0], [1], [2], [3]] * 2),
        (_SLICED, 0, [[], [], [], [], [], [0, 1, 2, 3], [], []]),
    ],
)
def test_rows_are_counted_for_the_ranks_that_receive_them(groups, r, columns):
    kept = torch.tensor([[1, 2, 4, 8], [3, 0, 0, 5]], dtype=torch.int32)
    reports = [
        SimpleNamespace(num_routed_KE=row[None], num_kept_per_expert_E=row, num_slots=40)
        for row in kept
    ]
    counts = routing_counts(reports, groups, r)
    assert counts.received.tolist() == [
        [sum(row[e] for e in experts) for experts in columns] for row in kept.tolist()
    ]
    assert counts.slots.tolist() == [40, 40]


def test_nothing_routed_is_no_number_that_is_not_one():
    zeros = RoutingCounts(
        *(torch.zeros(1, n, dtype=torch.int32) for n in (4, 4, 2)), torch.zeros(1)
    )
    assert [each.item() for each in utilisation(zeros)] == [0, 0, 0, 0, 4]
