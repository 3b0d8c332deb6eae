"""GPUs found, ranks placed, and the whole plan of a job on made-up machines."""

import os
import re

import pytest
from launch_helpers import EIGHT_GPUS, as_torch_lists, make_machine, value_after, variables

from fairseq_tutel.launch import devices
from fairseq_tutel.launch.commands import parse_command
from fairseq_tutel.launch.devices import Gpu, visible_gpus
from fairseq_tutel.launch.job import Job, Options, prepare_job
from fairseq_tutel.launch.placement import Placement

PCIS = list(EIGHT_GPUS)


def srun_task(procid, tasks, node, local):
    return variables(
        "SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[07-08] SLURM_STEP_NUM_NODES=2 "
        f"SLURM_NNODES=2 MASTER_ADDR=localhost SLURM_PROCID={procid} SLURM_STEP_NUM_TASKS={tasks} "
        f"SLURM_NODEID={node} SLURM_LOCALID={local}"
    )


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with two sockets and 8 GPUs, and all of its 32 CPUs allowed."""
    monkeypatch.setattr(devices, "ask_torch", as_torch_lists())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    return str(make_machine(tmp_path / "root"))


def plan(node, words, env=None, **options):
    env = {"PATH": os.environ["PATH"], **(env or {})}
    command = parse_command(words.split(), env["PATH"])
    return prepare_job(Options(root=node, **options), command, env)


TRAIN = "python -m fairseq_cli.train data"


def test_visible_gpus(tmp_path, monkeypatch):
    assert devices.ask_torch({"PYTHONHOME": "/nowhere"}) == ""  # as where torch cannot start
    monkeypatch.setattr(devices, "ask_torch", lambda env: f"noise\nGPU {PCIS[2]}\nGPU -\n")
    root = make_machine(tmp_path)
    assert visible_gpus({}, root) == [Gpu(0, PCIS[2]), Gpu(1, None)]
    for hidden in ("", "-1"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": hidden}, root) == []
    assert visible_gpus({}, tmp_path / "elsewhere") == []
    # what is not used is not passed over in silence
    monkeypatch.setattr(devices, "ask_torch", lambda env: "")
    assert "torch lists no GPU" in plan(str(root), "true").summary
    assert "CUDA_VISIBLE_DEVICES" not in plan(str(root), "true").ranks[0].env
    assert "warning" not in plan(str(root), "true", {"CUDA_VISIBLE_DEVICES": ""}).summary


def test_auto_starts_one_rank_per_gpu(node):
    job = plan(node, TRAIN)
    assert [rank.rank for rank in job.ranks] == list(range(8))
    for i, rank in enumerate(job.ranks):
        assert value_after(rank.argv, "--device-id") == str(i) == rank.env["LOCAL_RANK"]
        assert value_after(rank.argv, "--distributed-backend") == "nccl"
        assert rank.env["OMP_NUM_THREADS"] == "2" and rank.env["WORLD_SIZE"] == "8"
    assert {rank.env["MASTER_PORT"] for rank in job.ranks} == {job.ranks[0].env["MASTER_PORT"]}
    assert "8 ranks on 1 node (started by launcher), nccl on GPUs" in job.summary
    assert job.summary.count("\n") == 10  # a header, the table's two and 8 ranks
    # or as many as the command says, or none on GPUs
    assert len(plan(node, TRAIN + " --distributed-world-size 4").ranks) == 4
    job = plan(node, TRAIN + " --cpu", nproc_per_node=16)
    assert all(rank.env["CUDA_VISIBLE_DEVICES"] == "" for rank in job.ranks)


def test_what_ranks_find_in_their_environment(node):
    cpu, one = TRAIN + " --cpu", {"nproc_per_node": 1}
    ordered, pages = "NCCL_LAUNCH_ORDER_IMPLICIT", "THP_MEM_ALLOC_ENABLE"
    for words, options, name, want in (
        (TRAIN, {}, ordered, "1"),  # communicators of one GPU are ordered
        (TRAIN, one, ordered, None),
        (cpu, {"nproc_per_node": 2}, ordered, None),
        (cpu, {}, pages, "1"),  # huge pages for ranks on the CPU
        (TRAIN, {}, pages, None),
        (TRAIN, {}, "CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        (TRAIN, {"nccl_profile": "ib-adaptive-routing"}, "NCCL_IB_ADAPTIVE_ROUTING", "1"),
        (TRAIN, {"nccl_profile": "zero-sm"}, "NCCL_CTA_POLICY", "2"),
        (TRAIN, {"nccl_profile": "zero-sm"}, "FAIRSEQ_TUTEL_NCCL_PROFILE", "zero-sm"),
        (TRAIN, {}, "OMP_NUM_THREADS", "2"),
        (TRAIN, {}, "MASTER_ADDR", "127.0.0.1"),
        # for the record
        (TRAIN, {}, "FAIRSEQ_TUTEL_BIND", "auto cores=0-1,16-17"),
        (TRAIN, {"bind": "none"}, "FAIRSEQ_TUTEL_BIND", "none"),
        (TRAIN, {"bind": "none"}, "OMP_NUM_THREADS", "2"),
    ):
        assert plan(node, words, **options).ranks[0].env.get(name) == want, (words, name)
        if want and not name.startswith("FAIRSEQ"):
            assert plan(node, words, {name: "7"}, **options).ranks[0].env[name] == "7"
    assert plan(node, TRAIN, {"OMP_NUM_THREADS": "7"}).summary.count(" 7\n") == 7
    port = plan(node, TRAIN + " --distributed-port 1111").ranks[0].env["MASTER_PORT"]
    assert port == "1111"


def test_generate_sees_only_its_gpu(node):
    ranks = plan(node, "python -m fairseq_cli.generate data --path m", nproc_per_node=2).ranks
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]
    assert all("--distributed-init-method" not in rank.argv for rank in ranks)
    env = {"CUDA_VISIBLE_DEVICES": "6,3"}
    ranks = plan(node, "python -m fairseq_cli.generate data", env, nproc_per_node=2).ranks
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["6", "3"]


def test_adopted_ranks_of_srun(node, monkeypatch):
    job = plan(node, TRAIN, srun_task(13, 16, 1, 5))
    (rank,) = job.ranks
    assert job.placement.adopted and rank.rank == 13
    assert value_after(rank.argv, "--distributed-rank") == "13"
    assert value_after(rank.argv, "--device-id") == "5"
    assert len(rank.binding.cpus) == 4 and rank.env["MASTER_ADDR"] == "localhost"
    # srun --gpus-per-task=1: every rank finds one GPU, its own, as number 0
    monkeypatch.setattr(devices, "ask_torch", as_torch_lists([PCIS[6]]))
    (rank,) = plan(node, TRAIN, srun_task(6, 16, 0, 6)).ranks
    assert value_after(rank.argv, "--device-id") == "0"
    assert value_after(rank.argv, "--distributed-rank") == "6"
    # all eight could be on its socket
    assert rank.binding.cpus == (14, 30)


def test_one_task_per_node_starts_that_nodes_ranks(node):
    job = plan(node, TRAIN, srun_task(1, 2, 1, 0))
    assert not job.placement.adopted and job.placement.source == "srun"
    assert [rank.rank for rank in job.ranks] == list(range(8, 16))
    other = plan(node, TRAIN, srun_task(0, 2, 0, 0))
    assert job.ranks[0].env["MASTER_PORT"] == other.ranks[0].env["MASTER_PORT"]


def test_cores_that_the_user_gives(node, monkeypatch):
    """Each local rank has its own list; a rank of srun checks only its own."""
    job = plan(node, TRAIN, nproc_per_node=2, bind="0-3,16-19:8")
    assert [rank.binding.cpus for rank in job.ranks] == [(*range(4), *range(16, 20)), (8,)]
    assert [rank.env["OMP_NUM_THREADS"] for rank in job.ranks] == ["4", "1"]  # one per core
    assert job.ranks[0].env["FAIRSEQ_TUTEL_BIND"] == "given cores=0-3,16-19"
    with monkeypatch.context() as bound:
        bound.setattr(os, "sched_getaffinity", lambda pid: {8, 9})
        sets = ":".join(["0-1"] * 5 + ["8-9"] * 3)
        (rank,) = plan(node, TRAIN, srun_task(13, 16, 1, 5), bind=sets).ranks
        assert rank.binding.cpus == (8, 9)
    for sets, message in (
        ("0-3", "--bind 0-3: give a CPU list to each of 2 local ranks"),
        ("0:1:2", "--bind 0:1:2: give a CPU list"),
        ("0-3:", "--bind 0-3:: give a CPU list"),
        ("3-0:1", "CPU list '3-0': cannot read '3-0'; choose auto, none, or"),
        ("0:30-33", "local rank 1 cannot use CPU 32-33; the launcher may use 0-31"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(node, TRAIN, nproc_per_node=2, bind=sets)


def test_a_starters_binding_stands(node, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9, 24, 25})
    (rank,) = plan(node, TRAIN, srun_task(2, 16, 0, 2)).ranks
    assert rank.binding.cpus == (8, 9, 24, 25) and rank.binding.threads == 2
    assert rank.binding.note == "bound by srun"
    # mpirun binds to sockets by default: 4 of the 8 ranks share these 8 cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)) | set(range(16, 24)))
    env = {"RANK": "0", "SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}
    (rank,) = plan(node, TRAIN, {f"OMPI_COMM_WORLD_{k}": v for k, v in env.items()}).ranks
    assert rank.env["OMP_NUM_THREADS"] == "2"


BATCH = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
VISIBLE = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    "env, options, message",
    [
        (BATCH, {}, "the SLURM job has 2 nodes, but this is no task of a step"),
        ({}, {"nnodes": 2}, "--nnodes 2 needs --node-rank"),
        ({}, {"node_rank": 1}, "--node-rank 1 is not below --nnodes 1"),
        ({}, {"nnodes": 2, "node_rank": 1, "nproc_per_node": 1}, "host of rank 0 is unknown"),
        (srun_task(1, 4, 0, 1), {"nnodes": 3}, "--nnodes 3 contradicts srun, which states 2"),
        (srun_task(1, 4, 0, 1), {"nproc_per_node": 4}, "--nproc-per-node 4 contradicts srun"),
        ({}, {"nproc_per_node": 9}, "9 ranks on this node but 8 visible GPUs: start fewer"),
        (VISIBLE, {"nproc_per_node": 4}, "4 ranks .* 2 visible .*CUDA_VISIBLE_DEVICES=0,1"),
    ],
)
def test_refused(node, env, options, message):
    with pytest.raises(ValueError, match=message):
        plan(node, TRAIN, env, **options)


@pytest.mark.parametrize(
    "source, adopted, world, local, nodes, talks",
    [
        ("launcher", False, 4, 2, 2, True),
        ("srun", True, 2, 1, 2, True),
        ("srun", True, 4, 2, 2, False),
        ("mpirun", True, 3, 1, 3, False),
        ("torchrun", True, 2, 1, 2, False),
    ],
)
def test_which_nodes_compare_notes(source, adopted, world, local, nodes, talks):
    placement = Placement(source, adopted, 0, world, 0, local, 0, nodes)
    ranks = [None] * (1 if adopted else local)
    job = Job(placement, parse_command(["fairseq-train"]), ranks, "", cpu=True)
    assert (job.report() is not None) == talks


def test_a_request_to_save_waits_for_ranks_that_will_take_it(node):
    for words, holds in (
        ("python -m fairseq_cli.hydra_train task.data=d", True),
        (TRAIN, True),
        ("python -m fairseq_cli.eval_lm d", False),
        ("python script.py", False),
    ):
        assert plan(node, words, nproc_per_node=1).trains == holds, words
