"""Nodes compare what they are about to start; an error on one of them is reported and ends all."""

import os
import socket
import sys
import threading
import time

import pytest
from launch_helpers import (
    ended,
    environment,
    executable,
    launch,
    script_words,
    start_nodes,
    variables,
    wait_for,
)

from fairseq_tutel.command_line import EXIT_GROWN
from fairseq_tutel.launch.preflight import SharedError, compare_nodes


def node(number, **changes):
    same = {"nodes": 3, "ranks per node": 8, "device": "cuda", "command": "fairseq-train"}
    return {"node": number, "host": f"host{number}", **same, **changes}


def outcomes(port, reports, seconds=10.0):
    """What `compare_nodes` comes to on every node, by its place in `reports`."""
    results = {}

    def run(i, report):
        try:
            results[i] = compare_nodes(report, "127.0.0.1", port, seconds)
        except ValueError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(reports)]
    for thread in reversed(threads):  # node 0 comes last
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(timeout=60)
    return [results[i] for i in range(len(reports))]


def test_nodes_that_agree(port):
    assert outcomes(port, [node(0), node(1), node(2)]) == [None] * 3
    with socket.socket() as rank_0:  # as torch's store does
        rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank_0.bind(("", port))


def test_nodes_that_differ_all_hear_the_same(port):
    found = outcomes(port, [node(0), node(1), node(2, **{"ranks per node": 4, "device": "cpu"})])
    assert all(isinstance(error, SharedError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "ranks per node: 8 on host0 (node 0), 4 on host2 (node 2)" in str(found[0])
    assert "device: cuda on host0 (node 0), cpu on host2 (node 2)" in str(found[0])


def test_missing_nodes_are_named(port):
    found = outcomes(port, [node(0), node(1)], seconds=1.5)
    assert all("no report from node 2 of 3 within 1.5 seconds" in str(error) for error in found)
    (error,) = outcomes(port, [node(1)], seconds=0.5)
    assert f"node 1 had no answer within 0.5 seconds from 127.0.0.1:{port}" in str(error)
    assert not isinstance(error, SharedError)


@pytest.mark.parametrize(("per_node", "code", "ranks"), [((2, 1), 2, 0), ((2, 2), 0, 4)])
def test_launchers_of_two_nodes(tmp_path, port, per_node, code, ranks):
    scripts = [script_words(f"touch {tmp_path}/rank$RANK", count) for count in per_node]
    for process in start_nodes(port, *scripts):
        ended(process, code)
    assert len(list(tmp_path.iterdir())) == ranks


# Rank 0's first process stays for a second after rank 1's has left, with a store that listens.
_GROWING = f"""#!{sys.executable} -S
import os, pathlib, socket, sys, time
here, rank, port = pathlib.Path(sys.argv[1]), os.environ["RANK"], int(os.environ["MASTER_PORT"])
if (here / f"{{rank}} grown").exists():
    sys.exit(not (here / "0 gone").exists())
(here / f"{{rank}} grown").touch()
if rank == "0":
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(2)
    (here / "0 gone").touch()
sys.exit({EXIT_GROWN})
"""


def test_no_node_starts_again_before_rank_0_has_left(tmp_path, port):
    """Else its ranks would wait, for ever, for what is in the store of rank 0's first process."""
    program = executable(tmp_path / "fairseq-train", _GROWING)
    command = ["--nproc-per-node", "1", "--", program, str(tmp_path)]
    for process in start_nodes(port, command, command):
        text = ended(process, 0)
        assert text.count("the set has more experts: starting the ranks again") == 1


def test_a_node_whose_launcher_is_killed_as_the_run_grows_does_not_keep_the_first_waiting(
    tmp_path, port
):
    leaves = f"[ -e {tmp_path}/$RANK ] && exec sleep 60; touch {tmp_path}/$RANK; sleep $RANK"
    program = executable(tmp_path / "fairseq-train", f"#!/bin/bash\n{leaves}; exit {EXIT_GROWN}\n")
    command = ["--nproc-per-node", "1", "--agree-seconds", "2", "--", program]
    first, second = start_nodes(port, command, command)
    wait_for((tmp_path / "1").exists)
    second.kill()
    assert "no report from node 1 of 2 within 2 seconds" in ended(first, 2)
    second.communicate()


def test_an_error_of_one_node_alone_names_it(tmp_path):
    step = "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2"
    env = environment(**variables(f"{step} SLURM_JOB_ID=17 SLURM_NODEID=1 MASTER_ADDR=h"))
    executable(tmp_path / "scancel", f'#!/bin/sh\necho "$@" > {tmp_path}/words\n')
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    result = launch("--", "not-installed-here", env=env)
    assert result.returncode == 2
    assert f"launch: error on {socket.gethostname()}: cannot find the command" in result.stderr
    # srun by itself would let the other node wait for this one
    assert (tmp_path / "words").read_text() == "--signal=TERM 17.0\n"
