"""Adoption of the ranks that torchrun, srun and mpirun start, and where the ranks meet."""

import pytest

from fairseq_tutel.launch import rendezvous
from fairseq_tutel.launch.placement import Placement, adopt, start_here

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
# As SLURM 22.05 sets them for task 3 of `srun -N 2 --ntasks-per-node 2`.
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_nothing_to_adopt():
    assert adopt({}) is None
    assert adopt({"LOCAL_RANK": "0", "PATH": "/bin"}) is None
    # an sbatch script: SLURM_PROCID without a step
    batch = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert adopt(batch) is None


def test_torchrun():
    assert adopt(TORCHRUN) == Placement("torchrun", True, 5, 8, 1, 4, 1, 2)


def test_torch_variables_alone_mean_one_node():
    given = adopt({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert given == Placement("torchrun", True, 1, 2, 1, 2, 0, 1)
    assert given.single_node


def test_srun():
    assert adopt(SRUN) == Placement("srun", True, 3, 4, 1, 2, 1, 2)


def test_srun_with_unequal_nodes():
    env = {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    assert adopt(env).local_world_size == 2
    assert adopt({**env, "SLURM_NODEID": "0", "SLURM_PROCID": "1"}).local_world_size == 3


def test_mpirun():
    assert adopt(OPEN_MPI) == Placement("mpirun", True, 5, 8, 1, 4, 1, 2)
    assert adopt(HYDRA) == Placement("mpirun", True, 5, 8, 1, 4, 1, 2)


def test_the_innermost_starter_wins():
    # mpirun in a SLURM job starts its daemons with srun, and the ranks inherit that step
    daemon = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert adopt({**daemon, **OPEN_MPI}).source == "mpirun"
    assert adopt({**daemon, **OPEN_MPI, **TORCHRUN}).source == "torchrun"
    assert adopt({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}).source == "srun"


@pytest.mark.parametrize(
    "env, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE are set but LOCAL_RANK not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 is not below the world size"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x' is not a number"),
        ({**SRUN, "SLURM_NODEID": "5"}, "SLURM_NODEID=5"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "no local rank"),
    ],
)
def test_half_set_variables(env, message):
    with pytest.raises(ValueError, match=message):
        adopt(env)


def test_start_here():
    assert start_here(4, 2, 1) == Placement("launcher", False, 4, 8, 0, 4, 1, 2)
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 2, 2)):
        with pytest.raises(ValueError):
            start_here(*arguments)


@pytest.fixture
def no_scontrol(monkeypatch):
    monkeypatch.setattr(rendezvous, "_scontrol", lambda *arguments: None)


def test_master_address(no_scontrol):
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


def test_a_taken_port_is_an_error_on_rank_0_alone():
    with rendezvous.socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of rank 0's host is taken"):
            rendezvous.check_port_free(start_here(2, 1, 0), port)
        rendezvous.check_port_free(adopt(SRUN), port)
    rendezvous.check_port_free(start_here(2, 1, 0), port)
