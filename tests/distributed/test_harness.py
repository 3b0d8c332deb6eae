"""The helper that runs ranks: results, errors and hangs all come back."""

import time

import pytest
import torch.distributed as dist
from helpers.distributed import RanksFailed, on_ranks, run_ranks


@on_ranks(2, timeout=600)  # more than a test has
def _fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("raised by rank 1")
    dist.barrier()


def _hang_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(600)


def test_error_of_any_rank_is_shown():
    with pytest.raises(RanksFailed, match="(?s)rank 1: .*KeyError: 'raised by rank 1'") as caught:
        _fail_on_rank_1()
    assert "in _fail_on_rank_1" in str(caught.value)


def test_hanging_rank_is_ended_and_named():
    with pytest.raises(RanksFailed, match="_hang_on_rank_0"):
        run_ranks(_hang_on_rank_0, 2, timeout=6)
