"""What the package's own commands share."""

import logging
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest

from fairseq_tutel.command_line import quiet, run_and_exit, starters
from fairseq_tutel.command_line.starters import Started, full_place, master_address, master_port

PROGRAM = """
from fairseq_tutel.command_line import run_and_exit

def main():
    for number in range(100_000):
        print(number)
    return 0

run_and_exit(main)
"""


def test_a_reader_that_has_ended_is_no_error():
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **given) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()  # as head does
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""


def test_the_commands_import_fairseq_without_its_noise(caplog, monkeypatch):
    noise = "`torch.jit.script` is deprecated.", "Please install tensorboardX: pip install"

    def main():
        for text in (noise[0], "another warning"):
            warnings.warn(text, FutureWarning, stacklevel=1)
        for text in (noise[1], "another line"):
            logging.getLogger("fairseq.tasks.text_to_speech").warning(text)
        return 0

    for everything in (False, True):
        monkeypatch.setenv(quiet.VARIABLE, str(int(everything)))
        with warnings.catch_warnings(record=True) as seen, pytest.raises(SystemExit, match="0"):
            warnings.simplefilter("always")
            run_and_exit(main)
        said = {str(warning.message) for warning in seen} | set(caplog.messages)
        assert said == {"another warning", "another line"} | (set(noise) if everything else set())
        for each in list(logging.getLogger("fairseq.tasks.text_to_speech").filters):
            logging.getLogger("fairseq.tasks.text_to_speech").removeFilter(each)


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2"
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


@pytest.mark.parametrize("env, want", [
    (TORCHRUN, Started("torchrun", 5, 8, 1, 4, 1, 2)),
    (SRUN, Started("srun", 3, 4, 1, 2, 1, 2)),
    (OPEN_MPI, Started("mpirun", 5, 8, 1, 4, 1, 2)),
    (HYDRA, Started("mpirun", 5, 8, 1, 4, 1, 2)),
    # torch's variables alone mean one node
    (variables("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1"), Started("torchrun", 1, 2, 1, 2, 0, 1)),
    ({}, None),
    ({"LOCAL_RANK": "0", "PATH": "/bin"}, None),
    (BATCH, None),
    # the innermost: mpirun in a SLURM job starts its daemons with srun
    ({**SRUN, "SLURM_PROCID": "1", **OPEN_MPI}, Started("mpirun", 5, 8, 1, 4, 1, 2)),
    ({**SRUN, **OPEN_MPI, **TORCHRUN}, Started("torchrun", 5, 8, 1, 4, 1, 2)),
    ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, Started("srun", 3, 4, 1, 2, 1, 2)),
    (variables("RANK=0 WORLD_SIZE=2"), "RANK=0 is set, but not all of: WORLD_SIZE, LOCAL_RANK"),
    (variables("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0"), "rank 2 is not below world_size 2"),
    (variables("RANK=x WORLD_SIZE=2 LOCAL_RANK=0"), "RANK='x' is not a number"),
    ({**SRUN, "SLURM_NODEID": "5"}, "node_rank 5 is not below num_nodes 2"),
    (variables("PMI_RANK=1 PMI_SIZE=2"), "PMI_RANK=1 is set, but not all of: PMI_SIZE, PMI_LO"),
])  # fmt: skip
def test_the_place_that_each_starter_states(env, want):
    if isinstance(want, str):
        with pytest.raises(ValueError, match=re.escape(want)):
            full_place(env)
    else:
        assert full_place(env) == want


def test_where_ranks_meet(monkeypatch):
    place, other = full_place(SRUN), {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    found = Mock(return_value=Mock(stdout="NodeName=gpu07 NodeAddr=127.0.0.1 Port=6818\n"))
    monkeypatch.setattr(starters.subprocess, "run", found)
    monkeypatch.setattr(starters.socket, "getaddrinfo", Mock(side_effect=OSError("unknown")))
    assert master_address(place, SRUN) == "127.0.0.1"  # a host that no resolver knows
    monkeypatch.setattr(starters.socket, "getaddrinfo", Mock())
    assert master_address(place, SRUN) == "gpu07"
    assert master_address(place, {**SRUN, "MASTER_ADDR": "x"}) == "x"
    assert master_address(replace(place, node_rank=0, num_nodes=1), SRUN) == "127.0.0.1"
    with pytest.raises(ValueError, match="2 nodes, but the host of rank 0 is unknown"):
        master_address(full_place(OPEN_MPI), OPEN_MPI)
    for text, host in (
        *(("node1", "node1"), ("a,b", "a"), ("n[08-10],z", "n08"), ("r[1-2]n[0,3]", "r1n0")),
        *(("gpu[001,003-004]-ib,login", "gpu001-ib"), ("host.domain.org", "host.domain.org")),
    ):
        assert starters.first_host(text) == host

    assert master_port(place, {"MASTER_PORT": "1234"}) == 1234
    with pytest.raises(ValueError, match="'99999999' is not a port"):
        master_port(place, {"MASTER_PORT": "99999999"})
    # every rank of a job derives the same one, another step and another job another one
    port = master_port(place, SRUN)
    assert port == master_port(full_place(other), other) and 15000 <= port < 32000
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        assert port != master_port(place, {**SRUN, name: "18"})
    assert master_port(full_place(HYDRA), HYDRA) == starters.DEFAULT_PORT
