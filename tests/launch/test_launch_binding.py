"""Binding, planned on made-up machines and applied on this one."""

import os

import pytest
from launch_helpers import EIGHT_GPUS, TWO_SOCKETS, make_machine

from fairseq_tutel.launch.binding import (
    RankBinding,
    Topology,
    apply_binding,
    auto_bindings,
    format_table,
    parse_cpulist,
)
from fairseq_tutel.launch.devices import Gpu

GPUS = [Gpu(i, pci) for i, pci in enumerate(EIGHT_GPUS)]
SOCKETS = {node: set(parse_cpulist(text)) for node, text in TWO_SOCKETS.items()}


@pytest.fixture
def machine(tmp_path):
    return Topology.read(make_machine(tmp_path))


def test_topology(machine, tmp_path):
    assert {node: set(cpus) for node, cpus in machine.numa_cpus.items()} == SOCKETS
    assert machine.cores([3, 19, 4]) == [[3, 19], [4]]
    assert [machine.node_of(gpu) for gpu in GPUS] == list(EIGHT_GPUS.values())
    assert machine.node_of(Gpu(0, "0000:ff:00.0")) is None
    # without /sys the fallback; one node takes minus one for itself
    assert Topology.read(tmp_path / "bare", fallback_cpus=[3, 1]).numa_cpus == {0: (1, 3)}
    topology = Topology.read(make_machine(tmp_path / "one", {0: "0-3"}, {"0000:01:00.0": -1}, 0))
    assert topology.node_of(Gpu(0, "0000:01:00.0")) == 0


def test_each_rank_gets_its_share_of_its_gpus_socket(machine):
    plan = auto_bindings(machine, range(32), GPUS)
    for binding, gpu in zip(plan, GPUS, strict=True):
        node = EIGHT_GPUS[gpu.pci_id]
        assert set(binding.cpus) < SOCKETS[node]
        # 2 of the socket's 8 cores, each with both threads; one OpenMP thread per core
        assert len(binding.cpus) == 4 and binding.threads == 2
        assert {cpu % 16 for cpu in binding.cpus} == {cpu % 16 for cpu in binding.cpus if cpu < 16}
    assert sorted(cpu for b in plan for cpu in b.cpus) == list(range(32))


def test_a_cpuset_is_respected_and_shared_by_more_ranks_than_cores(machine):
    allowed = {2, 3, 18, 19, 12, 13}  # two full cores on socket 0, two without siblings on socket 1
    plan = auto_bindings(machine, allowed, [GPUS[0], GPUS[2]])
    assert plan[0].cpus == (2, 3, 18, 19) and plan[0].threads == 2
    assert plan[1].cpus == (12, 13) and plan[1].threads == 2
    plan = auto_bindings(machine, range(8), [GPUS[0], GPUS[2]])  # without the second's socket
    assert plan[0].cpus == tuple(range(8))
    assert "no allowed core in NUMA node 1" in plan[1].note
    assert set(plan[1].cpus) <= set(range(8))
    plan = auto_bindings(machine, {0, 16, 1}, GPUS[:2] + GPUS[4:6])
    assert all(b.cpus == (0, 1, 16) and b.threads == 1 for b in plan)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_cpu_ranks_split_the_cores_node_by_node(machine, ranks):
    plan = auto_bindings(machine, range(32), [None] * ranks)
    assert sorted(cpu for b in plan for cpu in b.cpus) == list(range(32))
    assert [b.threads for b in plan] == [len(b.cpus) // 2 for b in plan]
    assert max(b.threads for b in plan) - min(b.threads for b in plan) <= 1
    # only one of the slices may lie on both sockets
    assert sum(not any(set(b.cpus) <= cpus for cpus in SOCKETS.values()) for b in plan) == ranks % 2


def test_unknown_gpu_address_and_the_table(machine):
    plan = auto_bindings(machine, range(32), [Gpu(0, None), Gpu(1, None)])
    assert [b.note for b in plan] == ["NUMA node of the GPU unknown"] * 2
    assert set(plan[0].cpus) == SOCKETS[0] and set(plan[1].cpus) == SOCKETS[1]
    lines = format_table(auto_bindings(machine, range(32), GPUS[:2]), "n1").splitlines()
    assert lines[0] == "binding of the ranks on n1:"
    assert lines[2].split() == ["0", "0", "0000:07:00.0", "0-3,16-19", "4"]
    assert lines[3].split() == ["1", "1", "0000:0b:00.0", "4-7,20-23", "4"]


def test_apply_binds_or_reports_what_the_machine_refuses(capsys):
    before = os.sched_getaffinity(0)
    try:
        apply_binding(RankBinding(0, None, (min(before),), 1))
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    apply_binding(RankBinding(0, None, (4094,), 1))
    assert os.sched_getaffinity(0) == before
    assert "local rank 0 is not bound" in capsys.readouterr().err
