"""Node lists, CPU lists, PCI addresses, NCCL profiles."""

import importlib.metadata

import pytest

from fairseq_tutel.launch.nccl import profile_environment
from fairseq_tutel.launch.placement import expand_tasks_per_node
from fairseq_tutel.launch.rendezvous import first_host
from fairseq_tutel.launch.topology import format_cpulist, normalise_pci_id, parse_cpulist


@pytest.mark.parametrize(
    "text, host",
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[08-10],z", "n08"),
        ("gpu[001,003-004]-ib,login", "gpu001-ib"),
        ("login,gpu[1-2]", "login"),
        ("r[1-2]n[0,3]", "r1n0"),
        ("host.domain.org", "host.domain.org"),
    ],
)
def test_first_host_of_slurms_list(text, host):
    assert first_host(text) == host


def test_tasks_per_node():
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("8") == [8]
    with pytest.raises(ValueError, match="cannot read '2x3'"):
        expand_tasks_per_node("2x3")


@pytest.mark.parametrize(
    "text, cpus", [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("2,0-1", [0, 1, 2])]
)
def test_cpulist(text, cpus):
    assert parse_cpulist(text) == cpus


def test_cpulist_round_trip_and_errors():
    assert format_cpulist([9, 0, 1, 2, 7]) == "0-2,7,9"
    assert parse_cpulist(format_cpulist(range(64))) == list(range(64))
    for text in ("3-1", "a", "1-"):
        with pytest.raises(ValueError, match="cannot read"):
            parse_cpulist(text)


def test_pci_id():
    assert normalise_pci_id("00000000:3B:00.0") == "0000:3b:00.0"
    assert normalise_pci_id("3b:00.0") == "0000:3b:00.0"
    assert normalise_pci_id("00010001:3B:00.0") == "10001:3b:00.0"
    with pytest.raises(ValueError, match="PCI address"):
        normalise_pci_id("3b")


def test_nccl_profile():
    assert profile_environment("none", {}) == {}
    assert profile_environment("ib-adaptive-routing", {}) == {"NCCL_IB_ADAPTIVE_ROUTING": "1"}
    given = profile_environment("ib-adaptive-routing,sl=5,gid=3", {"NCCL_IB_SL": "1"})
    assert given == {"NCCL_IB_ADAPTIVE_ROUTING": "1", "NCCL_IB_GID_INDEX": "3"}


def test_profile_without_multiprocessors_needs_a_new_nccl(monkeypatch):
    def wheel(version):
        def find(name):
            if name != "nvidia-nccl-cu12" or version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", find)

    for version in ("2.28.9", "2.30.7.post1", None):  # None: it came with the system
        wheel(version)
        assert profile_environment("zero-sm", {})["NCCL_CTA_POLICY"] == "2"
    assert "NCCL_CTA_POLICY" not in profile_environment("zero-sm", {"NCCL_CTA_POLICY": "1"})
    wheel("2.27.5")
    with pytest.raises(ValueError, match="needs NCCL 2.28 or newer, torch has 2.27.5 here"):
        profile_environment("zero-sm", {})
    assert profile_environment("ib-adaptive-routing", {})


@pytest.mark.parametrize(
    "profile, message",
    [
        ("fast", "known are"),
        ("none,sl=1", "takes no settings"),
        ("zero-sm,sl=1", "takes no settings"),
        ("ib-adaptive-routing,sl=16", "from 0 to 15"),
        ("ib-adaptive-routing,qps=0", "from 1 to 128"),
        ("ib-adaptive-routing,speed=9", "is none of"),
    ],
)
def test_nccl_profile_refuses(profile, message):
    with pytest.raises(ValueError, match=message):
        profile_environment(profile, {})
