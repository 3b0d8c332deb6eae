"""Adoption of the ranks that torchrun, srun and mpirun start, and where the ranks meet."""

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


def test_nothing_to_adopt():
    assert adopt({}) is None
    assert adopt({"LOCAL_RANK": "0", "PATH": "/bin"}) is None
    # an sbatch script: SLURM_PROCID without a step
    batch = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert adopt(batch) is None


@pytest.mark.parametrize(
    "env, want",
    [
        (TORCHRUN, Placement("torchrun", True, 5, 8, 1, 4, 1, 2)),
        (SRUN, Placement("srun", True, 3, 4, 1, 2, 1, 2)),
        (OPEN_MPI, Placement("mpirun", True, 5, 8, 1, 4, 1, 2)),
        (HYDRA, Placement("mpirun", True, 5, 8, 1, 4, 1, 2)),
    ],
)
def test_ranks_of_each_starter(env, want):
    assert adopt(env) == want


def test_torch_variables_alone_mean_one_node():
    given = adopt({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert given == Placement("torchrun", True, 1, 2, 1, 2, 0, 1)
    assert given.single_node


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


def test_start_here():
    assert start_here(4, 2, 1) == Placement("launcher", False, 4, 8, 0, 4, 1, 2)
    with pytest.raises(ValueError, match="rank 2 is not below world_size 2"):
        start_here(1, 2, 2)


def test_master_address(monkeypatch):
    monkeypatch.setattr(rendezvous, "_scontrol", lambda *arguments: "")
    assert rendezvous.master_address(start_here(2, 1, 0), {}) == "127.0.0.1"
    assert rendezvous.master_address(adopt(SRUN), SRUN) == "gpu07"
    assert rendezvous.master_address(adopt(SRUN), {**SRUN, "MASTER_ADDR": "x"}) == "x"
    with pytest.raises(ValueError, match="8 ranks on 2 nodes, but the host of rank 0"):
        rendezvous.master_address(adopt(OPEN_MPI), OPEN_MPI)


def test_scontrol_resolves_hosts_that_no_resolver_does(monkeypatch):
    answers = {("show", "node", "gpu07"): "NodeName=gpu07 NodeAddr=127.0.0.1 Port=6818\n"}
    monkeypatch.setattr(rendezvous, "_scontrol", lambda *arguments: answers[arguments])
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", _unknown_host)
    assert rendezvous.master_address(adopt(SRUN), SRUN) == "127.0.0.1"


def _unknown_host(*arguments):
    raise OSError("Name or service not known")


@pytest.mark.parametrize(
    "text, host",
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[08-10],z", "n08"),
        ("gpu[001,003-004]-ib,login", "gpu001-ib"),
        ("r[1-2]n[0,3]", "r1n0"),
        ("host.domain.org", "host.domain.org"),
    ],
)
def test_first_host_of_slurms_list(text, host):
    assert rendezvous.first_host(text) == host


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
