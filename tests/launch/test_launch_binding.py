"""Binding, planned on made-up machines and applied on this one."""

import os
import subprocess
import sys

import pytest
from launch_helpers import EIGHT_GPUS, LAUNCHER_ALONE, TWO_SOCKETS, make_machine

from fairseq_tutel.launch.binding import (
    apply_binding,
    auto_bindings,
    explicit_bindings,
    format_table,
    no_bindings,
    parse_explicit,
)
from fairseq_tutel.launch.devices import Gpu
from fairseq_tutel.launch.topology import Topology, parse_cpulist

GPUS = [Gpu(i, pci) for i, pci in enumerate(EIGHT_GPUS)]
SOCKETS = {node: set(parse_cpulist(text)) for node, text in TWO_SOCKETS.items()}


@pytest.fixture
def machine(tmp_path):
    return Topology.read(make_machine(tmp_path))


def test_topology(machine):
    assert {node: set(cpus) for node, cpus in machine.numa_cpus.items()} == SOCKETS
    assert machine.cores([3, 19, 4]) == [[3, 19], [4]]
    assert [machine.node_of_pci(gpu.pci_id) for gpu in GPUS] == list(EIGHT_GPUS.values())
    assert machine.node_of_pci("0000:ff:00.0") is None


def test_topology_of_one_node_takes_minus_one_for_it(tmp_path):
    topology = Topology.read(make_machine(tmp_path, {0: "0-3"}, {"0000:01:00.0": -1}, 0))
    assert topology.node_of_pci("0000:01:00.0") == 0


def test_topology_without_sys_uses_the_fallback(tmp_path):
    assert Topology.read(tmp_path, fallback_cpus=[3, 1]).numa_cpus == {0: (1, 3)}


def test_each_rank_gets_its_share_of_its_gpus_socket(machine):
    plan = auto_bindings(machine, range(32), GPUS)
    for binding, gpu in zip(plan, GPUS, strict=True):
        node = EIGHT_GPUS[gpu.pci_id]
        assert set(binding.cpus) < SOCKETS[node]
        assert binding.numa == (node,)
        # 2 of the socket's 8 cores, each with both threads; one OpenMP thread per core
        assert len(binding.cpus) == 4 and binding.threads == 2
        assert {cpu % 16 for cpu in binding.cpus} == {cpu % 16 for cpu in binding.cpus if cpu < 16}
    assert sorted(cpu for b in plan for cpu in b.cpus) == list(range(32))


def test_a_cpuset_is_respected(machine):
    allowed = {2, 3, 18, 19, 12, 13}  # two full cores on socket 0, two without siblings on socket 1
    plan = auto_bindings(machine, allowed, [GPUS[0], GPUS[2]])
    assert plan[0].cpus == (2, 3, 18, 19) and plan[0].threads == 2
    assert plan[1].cpus == (12, 13) and plan[1].threads == 2


def test_a_cpuset_without_the_gpus_socket(machine):
    plan = auto_bindings(machine, range(8), [GPUS[0], GPUS[2]])
    assert plan[0].cpus == tuple(range(8))
    assert "no allowed core in NUMA node 1" in plan[1].note
    assert set(plan[1].cpus) <= set(range(8))


def test_more_ranks_than_cores_share_them(machine):
    plan = auto_bindings(machine, {0, 16, 1}, GPUS[:2] + GPUS[4:6])
    assert all(b.cpus == (0, 1, 16) and b.threads == 1 for b in plan)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_cpu_ranks_split_the_cores_node_by_node(machine, ranks):
    plan = auto_bindings(machine, range(32), [None] * ranks)
    assert sorted(cpu for b in plan for cpu in b.cpus) == list(range(32))
    assert [b.threads for b in plan] == [len(b.cpus) // 2 for b in plan]
    assert max(b.threads for b in plan) - min(b.threads for b in plan) <= 1
    # only one of the slices may lie on both sockets, and memory is free for it alone
    assert sum(b.numa is None for b in plan) == ranks % 2


def test_unknown_gpu_address(machine):
    plan = auto_bindings(machine, range(32), [Gpu(0, None), Gpu(1, None)])
    assert [b.note for b in plan] == ["NUMA node of the GPU unknown"] * 2
    assert set(plan[0].cpus) == SOCKETS[0] and set(plan[1].cpus) == SOCKETS[1]


def test_none_binds_nothing_but_shares_out_threads(machine):
    plan = no_bindings(machine, range(32), [None] * 4)
    assert all(b.cpus is None and b.numa is None and b.threads == 4 for b in plan)


@pytest.mark.parametrize(
    "text, ranks, sets",
    [
        ("0-3,4-7", 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("0,1", 1, [(0, 1)]),
        ("0-1,16:2-3,18", 2, [(0, 1, 16), (2, 3, 18)]),
        ("0-1;2", 2, [(0, 1), (2,)]),
        ("0xf,0xF0", 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("0x10001", 1, [(0, 16)]),
    ],
)
def test_explicit(text, ranks, sets):
    assert parse_explicit(text, ranks) == sets


@pytest.mark.parametrize(
    "text, ranks, message",
    [
        ("0-3", 2, "1 sets of CPUs for 2 ranks"),
        ("0-3,4-7,8", 2, "3 sets of CPUs for 2 ranks"),
        ("0xzz", 1, "not a mask"),
        ("0x0", 1, "names no CPU"),
        ("a", 1, "--bind a: neither auto nor none"),
        ("0,a", 1, "cannot read 'a'"),
        ("0:", 2, "names no CPU"),
    ],
)
def test_explicit_refuses(text, ranks, message):
    with pytest.raises(ValueError, match=message):
        parse_explicit(text, ranks)


def test_explicit_stays_within_the_allowed_cores(machine):
    plan = explicit_bindings(machine, range(32), [None, None], "0-1,8-9")
    assert [b.cpus for b in plan] == [(0, 1), (8, 9)]
    assert [b.numa for b in plan] == [(0,), (1,)]
    with pytest.raises(ValueError, match="CPUs 9 of local rank 1 are not among"):
        explicit_bindings(machine, range(9), [None, None], "0-1,8-9")


def test_table(machine):
    lines = format_table(auto_bindings(machine, range(32), GPUS[:2]), "n1").splitlines()
    assert lines[0] == "binding of the ranks on n1:"
    assert lines[2].split() == ["0", "0", "0000:07:00.0", "0-3,16-19", "0", "4"]
    assert lines[3].split() == ["1", "1", "0000:0b:00.0", "4-7,20-23", "0", "4"]


_APPLY = """
import ctypes, os
from fairseq_tutel.launch.binding import RankBinding, apply_binding
cpu = min(os.sched_getaffinity(0))
apply_binding(RankBinding(0, None, (cpu,), (0,), 1))
assert os.sched_getaffinity(0) == {cpu}
mode, mask = ctypes.c_int(), ctypes.c_ulong()
number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]  # get_mempolicy
if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), ctypes.byref(mask), 64, None, 0) == 0:
    assert (mode.value, mask.value) == (2, 1), (mode.value, mask.value)  # MPOL_BIND, node 0
    print("memory bound")
"""


def test_apply_binds_this_machine():
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER_ALONE + _APPLY], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    # A container may forbid memory policies; then that, and nothing else, was reported.
    assert result.stdout == "memory bound\n" or "not fully bound" in result.stderr


def test_apply_reports_what_the_machine_refuses(capsys):
    plan = auto_bindings(Topology({0: (4094,)}, {4094: 4094}, "/"), [4094], [None])
    before = os.sched_getaffinity(0)
    apply_binding(plan[0])
    assert os.sched_getaffinity(0) == before
    assert "local rank 0 is not fully bound" in capsys.readouterr().err
