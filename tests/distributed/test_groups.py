"""Placement of experts on ranks, with real process groups, and the simulated one."""

import os

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import on_ranks
from helpers.layers import HIDDEN, M, make_layer, run

from fairseq_tutel.distributed import (
    build_groups,
    expert_parallelism,
    gather_integers,
    possible_r,
    process_world,
    sync_step,
)
from fairseq_tutel.distributed.placement import groups as groups_module

# partners of each of four ranks
ALONE, ALL = [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4
NEXT, ACROSS = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
# W=4: experts -> (exchange size, replicas, experts of each rank, exchange and replica partners)
PLACEMENT = {
    1: (1, 4, [[0], [0], [0], [0]], ALONE, ALL),
    2: (2, 2, [[0], [1], [0], [1]], NEXT, ACROSS),
    4: (4, 1, [[0], [1], [2], [3]], ALL, ALONE),
    8: (4, 1, [[0, 1], [2, 3], [4, 5], [6, 7]], ALL, ALONE),
    # (E, S), chosen
    (6, 2): (2, 2, [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]], NEXT, ACROSS),
    (3, 1): (1, 4, [[0, 1, 2]] * 4, ALONE, ALL),
}


@on_ranks(4)
def test_placement_on_four_ranks():
    _different_expert_counts()  # groups of different ranks would be waited for until the limit
    _communicators()
    _control_groups()
    rank, _ = process_world()
    for experts, (size, replicas, local, exchange, replica) in PLACEMENT.items():
        count, chosen = experts if isinstance(experts, tuple) else (experts, 0)
        groups = build_groups(count, expert_parallel_size=chosen)
        partners = [
            [rank] if group is None else dist.get_process_group_ranks(group)
            for group in (groups.ep_group, groups.replica_group)
        ]
        assert groups.num_local_experts == len(groups.local_experts)
        assert groups.communicates == (groups.ep_size > 1)
        assert (groups.ep_size, groups.num_replicas) == (size, replicas)
        assert list(groups.local_experts) == local[rank], experts
        assert partners == [exchange[rank], replica[rank]], experts
        assert (groups.num_slices, groups.slice_index) == (1, 0)
        if not chosen:
            _compare_with_sliced(groups, build_groups(count, placement="sliced"))
    with pytest.raises(ValueError, match="disagree on placement: .*sliced on ranks .3."):
        build_groups(2, placement="sliced" if rank == 3 else "replicated")


def _compare_with_sliced(groups, sliced):
    """The ranks of an expert are the same; each has a slice, and agrees with all others."""
    assert sliced.num_slices == groups.num_replicas and sliced.needs_sync
    assert sliced.slice_index == groups.rank // groups.ep_size
    for name in ("ep_size", "num_replicas", "local_experts", "ep_group", "replica_group"):
        assert getattr(sliced, name) == getattr(groups, name), name
    step = sync_step(10 + groups.rank, None, sliced)
    assert step.num_tokens == 9 + groups.world_size


def _indivisible():
    def refuse(*args, **kwargs):
        raise AssertionError("a collective call before the check")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "all_reduce", "all_gather", "barrier"):
            patch.setattr(dist, name, refuse)
        with pytest.raises(ValueError, match="5 experts cannot be spread over 2 ranks"):
            build_groups(5)
        for experts, size in ((8, 4), (5, 2), (8, -2)):
            with pytest.raises(ValueError, match=f"expert_parallel_size={size} .* 2, .* {experts}"):
                build_groups(experts, expert_parallel_size=size)


def test_simulation_plays_rank_0_of_many():
    for experts, size, replicas in ((16, 8, 1), (8, 8, 1), (2, 2, 4)):
        groups = build_groups(experts, simulate_world_size=8)
        assert (groups.ep_size, groups.num_replicas, groups.world_size) == (size, replicas, 8)
        assert groups.simulated and not groups.communicates and groups.ep_rank == 0
    groups = build_groups(1024, expert_parallel_size=32, simulate_world_size=256)
    assert (groups.ep_size, groups.num_replicas, groups.num_local_experts) == (32, 8, 32)


def _different_expert_counts():
    rank, _ = process_world()
    with pytest.raises(ValueError) as caught:
        build_groups(4 if rank else 2)
    with pytest.raises(ValueError) as of_sizes:
        build_groups(4, expert_parallel_size=2 if rank else 0)
    assert "num_experts: 2 on ranks [0]; 4 on ranks [1, 2, 3]" in str(caught.value)
    assert "expert_parallel_size: 2 on ranks [1, 2, 3]; 4 on ranks [0]" in str(of_sizes.value)


def _share_and_count(file):
    rank, _ = process_world()
    with torch.device("meta"):
        assert build_groups(8, simulate_world_size=4).simulated
    with pytest.raises(ValueError, match="a simulation of 4 ranks runs in one process, not in 2"):
        build_groups(8, simulate_world_size=4)
    first, second, other = build_groups(4), build_groups(4), build_groups(2)
    assert second is first and other is not first
    with pytest.raises(ValueError, match="4 on ranks .1.; 8 on ranks .0."):
        build_groups(4 if rank else 8)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    dist.barrier(build_groups(4).ep_group)  # not the destroyed one


@on_ranks(2)
def test_indivisible_counts_and_simulations_are_refused_before_any_collective(tmp_path):
    _indivisible()
    _share_and_count(tmp_path / "store")


def _control_groups():
    rank, _ = process_world()
    assert build_groups(4).control_group is None  # gloo needs no other
    with pytest.MonkeyPatch.context() as patch:
        # as with NCCL: the default group is said to communicate from GPUs alone
        patch.setattr(groups_module, "control_device", lambda group=None: "cuda")
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        assert build_groups(24).control_group is not None  # over the loopback interface
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        # two machines: the host's name may resolve to an address that others do not reach
        patch.setattr(groups_module, "this_machine", lambda: rank // 2)
        warned = []
        patch.setattr(groups_module.logger, "warning", warned.append)
        if rank == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for experts in (12, 28):  # rank 1 alone knows the network
            assert build_groups(experts).control_group is None
        assert len(warned) == (rank == 0) and all("step=sync_step" in each for each in warned)
        assert build_groups(12, expert_parallel_size=2).control_group is not None
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for size in (4, 2):
            group = build_groups(16, expert_parallel_size=size).control_group
            mine = list(range(rank // size * size, (rank // size + 1) * size))
            assert group is not dist.group.WORLD and dist.get_backend(group) == "gloo"
            assert dist.get_process_group_ranks(group) == mine
            assert gather_integers([rank, 7], group) == [[r, 7] for r in mine]
        assert build_groups(16, expert_parallel_size=1).control_group is None
        groups = build_groups(20)
        assert groups.control_group is build_groups(16).control_group
        assert sync_step(10 * rank, None, groups).num_tokens == 30


def _communicators():
    world = dist.group.WORLD
    assert build_groups(8).ep_group is world and build_groups(1).replica_group is world
    assert build_groups(2).ep_group not in (world, None)


def test_simulated_ranks_copy_what_they_would_send_and_gather():
    for experts in (2, 8):
        groups = build_groups(experts, simulate_world_size=8, placement="sliced")
        layer = make_layer(groups)
        x = torch.randn(12, M, dtype=torch.float64)
        for r in possible_r(groups):
            parallelism = expert_parallelism(groups, r)
            assert parallelism.gather_size == (8 if r == 0 else groups.num_slices // r)
            found = run(layer, x, x, r=r)
            assert found["y"].shape == x.shape
            assert all(torch.isfinite(value).all() for value in found.values())
            prepared = layer.experts.prepare(x.dtype, parallelism)
            held = experts if r == 0 else 1
            assert prepared.params[0].shape == (held, HIDDEN // (r or 1), M)
            assert prepared.params[2].shape == (held, M, HIDDEN // (r or 1))
