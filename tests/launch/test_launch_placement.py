"""Adoption of the ranks that torchrun, srun and mpirun start, and where the ranks meet."""

from unittest.mock import Mock

import pytest
from launch_helpers import variables

from fairseq_tutel.launch import placement as rendezvous
from fairseq_tutel.launch.placement import Placement, adopt, start_here

TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=n0 MASTER_PORT=29500"
)
# As SLURM 22.05 sets them for task 3 of `srun -N 2 --ntasks-per-node 2`.
SRUN = variables(
    "SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 "
    "SLURM_STEP_NODELIST=gpu[07-08]"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4"
)
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


# an sbatch script: SLURM_PROCID without a step
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    "env, want",
    [
        (TORCHRUN, Placement("torchrun", True, 5, 8, 1, 4, 1, 2)),
        (SRUN, Placement("srun", True, 3, 4, 1, 2, 1, 2)),
        (OPEN_MPI, Placement("mpirun", True, 5, 8, 1, 4, 1, 2)),
        (HYDRA, Placement("mpirun", True, 5, 8, 1, 4, 1, 2)),
        # torch's variables alone mean one node
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
         Placement("torchrun", True, 1, 2, 1, 2, 0, 1)),
        ({}, None),
        ({"LOCAL_RANK": "0", "PATH": "/bin"}, None),
        (BATCH, None),
    ],
)  # fmt: skip
def test_ranks_of_each_starter(env, want):
    placement = adopt(env)
    assert placement == want
    assert want is None or placement.single_node == (want.num_nodes == 1)


def test_the_innermost_starter_wins():
    # mpirun in a SLURM job starts its daemons with srun, and the ranks inherit that step
    daemon = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert adopt({**daemon, **OPEN_MPI}).source == "mpirun"
    assert adopt({**daemon, **OPEN_MPI, **TORCHRUN}).source == "torchrun"
    assert adopt({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}).source == "srun"


@pytest.mark.parametrize(
    "env, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 is set, but not all of: WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 is not below world_size 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x' is not a number"),
        ({**SRUN, "SLURM_NODEID": "5"}, "node_rank 5 is not below num_nodes 2"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1 is set, but not all of: PMI_SIZE, PMI_LO"),
    ],
)
def test_half_set_variables(env, message):
    with pytest.raises(ValueError, match=message):
        adopt(env)


def test_start_here_and_the_master_address(monkeypatch):
    assert start_here(4, 2, 1) == Placement("launcher", False, 4, 8, 0, 4, 1, 2)
    with pytest.raises(ValueError, match="rank 2 is not below world_size 2"):
        start_here(1, 2, 2)
    monkeypatch.setattr(rendezvous, "_scontrol", lambda *arguments: "")
    assert rendezvous.master_address(start_here(2, 1, 0), {}) == "127.0.0.1"
    assert rendezvous.master_address(adopt(SRUN), SRUN) == "gpu07"
    assert rendezvous.master_address(adopt(SRUN), {**SRUN, "MASTER_ADDR": "x"}) == "x"
    with pytest.raises(ValueError, match="2 nodes, but the host of rank 0"):
        rendezvous.master_address(adopt(OPEN_MPI), OPEN_MPI)


def test_scontrol_resolves_hosts_that_no_resolver_does(monkeypatch):
    answers = {("show", "node", "gpu07"): "NodeName=gpu07 NodeAddr=127.0.0.1 Port=6818\n"}
    monkeypatch.setattr(rendezvous, "_scontrol", lambda *arguments: answers[arguments])
    unknown = Mock(side_effect=OSError("Name or service not known"))
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unknown)
    assert rendezvous.master_address(adopt(SRUN), SRUN) == "127.0.0.1"


def test_first_host_of_slurms_list():
    hosts = {
        "node1": "node1", "a,b": "a", "n[08-10],z": "n08", "r[1-2]n[0,3]": "r1n0",
        "gpu[001,003-004]-ib,login": "gpu001-ib", "host.domain.org": "host.domain.org",
    }  # fmt: skip
    assert {text: rendezvous.first_host(text) for text in hosts} == hosts


def test_master_port():
    assert rendezvous.master_port(adopt(SRUN), {"MASTER_PORT": "1234"}) == 1234
    with pytest.raises(ValueError, match="'99999999' is not a port"):
        rendezvous.master_port(adopt(SRUN), {"MASTER_PORT": "99999999"})
    # every rank of a job derives the same one, another step and another job another one
    first = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    port = rendezvous.master_port(adopt(SRUN), SRUN)
    assert port == rendezvous.master_port(adopt(first), first)
    assert 15000 <= port < 32000
    assert port != rendezvous.master_port(adopt(SRUN), {**SRUN, "SLURM_JOB_ID": "18"})
    assert port != rendezvous.master_port(adopt(SRUN), {**SRUN, "SLURM_STEP_ID": "1"})
    assert rendezvous.master_port(adopt(HYDRA), HYDRA) == rendezvous.DEFAULT_PORT
