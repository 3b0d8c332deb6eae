"""GPUs found, ranks placed and bound, and the whole plan of a job, on made-up machines."""

import os
import re

import pytest
from launch_helpers import EIGHT_GPUS, TWO_SOCKETS, as_torch_lists, make_machine, variables

from fairseq_tutel.command_line.starters import Started
from fairseq_tutel.launch import machine
from fairseq_tutel.launch.cli import build_parser
from fairseq_tutel.launch.commands import parse_command
from fairseq_tutel.launch.job import prepare_job
from fairseq_tutel.launch.machine import (
    Gpu,
    Topology,
    ask_torch,
    auto_bindings,
    format_cpulist,
    parse_cpulist,
    visible_gpus,
)

PCIS = list(EIGHT_GPUS)
GPUS = [Gpu(i, pci) for i, pci in enumerate(PCIS)]
SOCKETS = {node: set(parse_cpulist(text)) for node, text in TWO_SOCKETS.items()}
TRAIN = "python -m fairseq_cli.train data"
# As SLURM 22.05 sets them for task 3 of `srun -N 2 --ntasks-per-node 2`.
SRUN = variables(
    "SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[07-08]"
)
# an sbatch script: SLURM_PROCID without a step
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


def srun_task(rank, tasks, node, local):
    task = f"SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={tasks} SLURM_NODEID={node}"
    return {**SRUN, **variables(f"{task} SLURM_LOCALID={local} MASTER_ADDR=localhost")}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A node with two sockets and 8 GPUs, and all of its 32 CPUs allowed."""
    monkeypatch.setattr(machine, "ask_torch", as_torch_lists())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    return str(make_machine(tmp_path / "root"))


@pytest.fixture
def plan(root):
    """Returns the job that words of the launcher and a command make."""

    def make(words, env=None, options=""):
        env = {"PATH": os.environ["PATH"], **(env or {})}
        given = build_parser().parse_args([*options.split(), "--", *words.split()])
        given.root = root
        return prepare_job(given, parse_command(given.command[1:], env["PATH"]), env)

    return make


def value_after(rank, flag):
    return rank["argv"][rank["argv"].index(flag) + 1]


def test_topology(tmp_path):
    found = Topology(make_machine(tmp_path), ())
    assert {node: set(cpus) for node, cpus in found.numa_cpus.items()} == SOCKETS
    assert found.cores([3, 19, 4]) == [[3, 19], [4]]
    assert [found.node_of(gpu) for gpu in GPUS] == list(EIGHT_GPUS.values())
    assert found.node_of(Gpu(0, "0000:ff:00.0")) is None
    # without /sys what is allowed; one node takes minus one for itself
    assert Topology(tmp_path / "bare", [3, 1]).numa_cpus == {0: [1, 3]}
    one = Topology(make_machine(tmp_path / "one", {0: "0-3"}, {"0000:01:00.0": -1}, 0), ())
    assert one.node_of(Gpu(0, "0000:01:00.0")) == 0
    for text in ("", "0", "0-3", "0-3,8,10-11"):
        assert format_cpulist(parse_cpulist(text)) == text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_ranks_on_the_cpu_split_the_cores_node_by_node(root, ranks):
    bound = auto_bindings(Topology(root, ()), set(range(32)), [None] * ranks)
    assert sorted(cpu for each in bound for cpu in each.cpus) == list(range(32))
    assert [each.threads for each in bound] == [len(each.cpus) // 2 for each in bound]
    assert max(each.threads for each in bound) - min(each.threads for each in bound) <= 1
    # only one of the slices may lie on both sockets
    on_both = [not any(set(each.cpus) <= cpus for cpus in SOCKETS.values()) for each in bound]
    assert sum(on_both) == ranks % 2


def test_ranks_with_gpus_share_the_cores_of_their_sockets(root):
    topology, every = Topology(root, ()), set(range(32))
    bound = auto_bindings(topology, every, GPUS)
    for each in bound:
        assert set(each.cpus) < SOCKETS[EIGHT_GPUS[each.gpu.pci_id]]
        # 2 of the socket's 8 cores, each with both threads; one OpenMP thread per core
        assert len(each.cpus) == 4 and each.threads == 2 == len({cpu % 16 for cpu in each.cpus})
    assert sorted(cpu for each in bound for cpu in each.cpus) == list(range(32))
    # a cpuset: two full cores on socket 0, two without siblings on socket 1
    bound = auto_bindings(topology, {2, 3, 18, 19, 12, 13}, [GPUS[0], GPUS[2]])
    assert [(each.cpus, each.threads) for each in bound] == [([2, 3, 18, 19], 2), ([12, 13], 2)]
    bound = auto_bindings(topology, set(range(8)), [GPUS[0], GPUS[2]])  # not the second's socket
    assert bound[0].cpus == list(range(8)) and set(bound[1].cpus) <= set(range(8))
    assert "no allowed core in the GPU's NUMA node, 1" in str(bound[1])
    bound = auto_bindings(topology, {0, 16, 1}, GPUS[:2] + GPUS[4:6])  # more ranks than cores
    assert all((each.cpus, each.threads) == ([0, 1, 16], 1) for each in bound)
    bound = auto_bindings(topology, every, [Gpu(0, None), Gpu(1, None)])
    assert [set(each.cpus) for each in bound] == list(SOCKETS.values())


def test_visible_gpus(root, plan, tmp_path, monkeypatch):
    assert ask_torch({"PYTHONHOME": "/nowhere"}) == ""  # as where torch cannot start
    monkeypatch.setattr(machine, "ask_torch", lambda env: f"noise\nGPU {PCIS[2]}\nGPU -\n")
    assert visible_gpus({}, root) == [Gpu(0, PCIS[2]), Gpu(1, None)]
    for hidden in ("", "-1"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": hidden}, root) == []
    assert visible_gpus({}, tmp_path / "elsewhere") == []
    # what is not used is not passed over in silence
    monkeypatch.setattr(machine, "ask_torch", lambda env: "")
    assert "torch lists no GPU" in plan("true").summary
    assert "CUDA_VISIBLE_DEVICES" not in plan("true").ranks[0]["env"]
    assert "warning" not in plan("true", {"CUDA_VISIBLE_DEVICES": ""}).summary


def test_auto_starts_one_rank_per_gpu(plan):
    job = plan(TRAIN)
    assert [rank["env"]["RANK"] for rank in job.ranks] == [str(i) for i in range(8)]
    for i, rank in enumerate(job.ranks):
        assert value_after(rank, "--device-id") == str(i) == rank["env"]["LOCAL_RANK"]
        assert value_after(rank, "--distributed-backend") == "nccl" and rank["holds"]
        assert rank["env"]["OMP_NUM_THREADS"] == "2" and rank["env"]["WORLD_SIZE"] == "8"
    assert {rank["env"]["MASTER_PORT"] for rank in job.ranks} == {
        job.ranks[0]["env"]["MASTER_PORT"]
    }
    head, *lines = job.summary.splitlines()
    assert head.startswith("8 ranks on 1 node (started by launcher), nccl on GPUs, MASTER_ADDR=")
    assert lines[0] == f"  local rank 0: GPU 0 ({PCIS[0]}), auto cores=0-1,16-17, 2 threads"
    # or as many as the command says, or none on GPUs
    assert len(plan(TRAIN + " --distributed-world-size 4").ranks) == 4
    job = plan(TRAIN + " --cpu", options="--nproc-per-node 16")
    assert all(rank["env"]["CUDA_VISIBLE_DEVICES"] == "" for rank in job.ranks)
    assert plan("python -m fairseq_cli.hydra_train task.data=d").ranks[0]["holds"]
    for words in ("python -m fairseq_cli.eval_lm d", "python script.py"):
        assert not plan(words).ranks[0]["holds"], words


def test_what_ranks_find_in_their_environment(plan):
    cpu, one = TRAIN + " --cpu", "--nproc-per-node 1"
    ordered, pages = "NCCL_LAUNCH_ORDER_IMPLICIT", "THP_MEM_ALLOC_ENABLE"
    for words, options, name, want in (
        (TRAIN, "", ordered, "1"),  # communicators of one GPU are ordered
        (TRAIN, one, ordered, None),
        (cpu, "--nproc-per-node 2", ordered, None),
        (cpu, "", pages, "1"),  # huge pages for ranks on the CPU
        (TRAIN, "", pages, None),
        (TRAIN, "", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        (TRAIN, "--nccl-profile ib-adaptive-routing", "NCCL_IB_ADAPTIVE_ROUTING", "1"),
        (TRAIN, "--nccl-profile zero-sm", "NCCL_CTA_POLICY", "2"),
        (TRAIN, "--nccl-profile zero-sm", "FAIRSEQ_TUTEL_NCCL_PROFILE", "zero-sm"),
        (TRAIN, "", "OMP_NUM_THREADS", "2"),
        (TRAIN, "", "MASTER_ADDR", "127.0.0.1"),
        # for the record
        (TRAIN, "", "FAIRSEQ_TUTEL_BIND", "auto cores=0-1,16-17"),
        (TRAIN, "--bind none", "FAIRSEQ_TUTEL_BIND", "none"),
        (TRAIN, "--bind none", "OMP_NUM_THREADS", "2"),
    ):
        assert plan(words, options=options).ranks[0]["env"].get(name) == want, (words, name)
        if want and not name.startswith("FAIRSEQ"):
            assert plan(words, {name: "7"}, options).ranks[0]["env"][name] == "7"
    assert plan(TRAIN, {"OMP_NUM_THREADS": "7"}).summary.count(" 7 threads") == 8
    assert plan(TRAIN + " --distributed-port 1111").ranks[0]["env"]["MASTER_PORT"] == "1111"


def test_generate_sees_only_its_gpu(plan):
    words = "python -m fairseq_cli.generate data --path m"
    for env, seen in (({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "6,3"}, ["6", "3"])):
        ranks = plan(words, env, "--nproc-per-node 2").ranks
        assert [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in ranks] == seen
        assert all("--distributed-init-method" not in rank["argv"] for rank in ranks)


def test_tasks_of_srun(plan, monkeypatch):
    job = plan(TRAIN, srun_task(13, 16, 1, 5))
    (rank,) = job.ranks
    assert job.place.adopted and rank["env"]["RANK"] == "13" == value_after(
        rank, "--distributed-rank"
    )
    assert value_after(rank, "--device-id") == "5"
    assert len(rank["cpus"]) == 4 and rank["env"]["MASTER_ADDR"] == "localhost"
    # one task per node starts that node's ranks
    job, other = (plan(TRAIN, srun_task(node, 2, node, 0)) for node in (1, 0))
    assert not job.place.adopted and job.place == Started("srun", 8, 16, 0, 8, 1, 2, False)
    assert [rank["env"]["RANK"] for rank in job.ranks] == [str(i) for i in range(8, 16)]
    assert job.ranks[0]["env"]["MASTER_PORT"] == other.ranks[0]["env"]["MASTER_PORT"]
    # srun --gpus-per-task=1: every rank finds one GPU, its own, as number 0
    monkeypatch.setattr(machine, "ask_torch", as_torch_lists([PCIS[6]]))
    (rank,) = plan(TRAIN, srun_task(6, 16, 0, 6)).ranks
    assert (value_after(rank, "--device-id"), rank["env"]["RANK"]) == ("0", "6")
    assert rank["cpus"] == [14, 30]  # all eight could be on its socket
    monkeypatch.setattr(machine, "ask_torch", as_torch_lists())
    # a starter's binding stands
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9, 24, 25})
    (rank,) = plan(TRAIN, srun_task(2, 16, 0, 2)).ranks
    assert rank["cpus"] == [8, 9, 24, 25] and rank["env"]["OMP_NUM_THREADS"] == "2"
    # mpirun binds to sockets by default: 4 of the 8 ranks share these 8 cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: SOCKETS[0])
    env = {"RANK": "0", "SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}
    (rank,) = plan(TRAIN, {f"OMPI_COMM_WORLD_{k}": v for k, v in env.items()}).ranks
    assert rank["env"]["OMP_NUM_THREADS"] == "2" and rank["env"]["FAIRSEQ_TUTEL_BIND"] == (
        "mpirun's cores=0-7,16-23"
    )


def test_cores_that_the_user_gives(plan, monkeypatch):
    """Each local rank has its own list; a rank of srun checks only its own."""
    job = plan(TRAIN, options="--nproc-per-node 2 --bind 0-3,16-19:8")
    assert [rank["cpus"] for rank in job.ranks] == [[*range(4), *range(16, 20)], [8]]
    assert [rank["env"]["OMP_NUM_THREADS"] for rank in job.ranks] == ["4", "1"]  # one per core
    assert job.ranks[0]["env"]["FAIRSEQ_TUTEL_BIND"] == "given cores=0-3,16-19"
    with monkeypatch.context() as bound:
        bound.setattr(os, "sched_getaffinity", lambda pid: {8, 9})
        sets = ":".join(["0-1"] * 5 + ["8-9"] * 3)
        (rank,) = plan(TRAIN, srun_task(13, 16, 1, 5), f"--bind {sets}").ranks
        assert rank["cpus"] == [8, 9]
    for sets, message in (
        ("0-3", "--bind 0-3: give a CPU list to each of 2 local ranks"),
        ("0:1:2", "--bind 0:1:2: give a CPU list"),
        ("0-3:", "--bind 0-3:: give a CPU list"),
        ("3-0:1", "CPU list '3-0': cannot read '3-0'; choose auto, none, or"),
        ("0:30-33", "local rank 1 cannot use CPU 32-33; the launcher may use 0-31"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(TRAIN, options=f"--nproc-per-node 2 --bind {sets}")


VISIBLE = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (BATCH, "", "the SLURM job has 2 nodes, but this is no task of a step"),
        ({}, "--nnodes 2", "--nnodes 2 needs --node-rank"),
        ({}, "--node-rank 1", "launcher: rank 8 is not below world_size 8"),
        ({}, "--nnodes 2 --node-rank 1 --nproc-per-node 1", "host of rank 0 is unknown"),
        (srun_task(1, 4, 0, 1), "--nnodes 3", "--nnodes 3 contradicts srun, which states 2"),
        (srun_task(1, 4, 0, 1), "--nproc-per-node 4", "--nproc-per-node 4 contradicts srun"),
        (srun_task(1, 3, 0, 1), "", "srun: 3 tasks on 2 nodes: start equally many on each node"),
        (srun_task(2, 4, 0, 2), "", "srun: local_rank 2 is not below local_world_size 2"),
        ({}, "--nproc-per-node 9", "9 ranks on this node but 8 visible GPUs: start fewer"),
        (VISIBLE, "--nproc-per-node 4", "4 ranks .* 2 visible .*CUDA_VISIBLE_DEVICES=0,1"),
    ],
)
def test_refused(plan, env, options, message):
    with pytest.raises(ValueError, match=message):
        plan(TRAIN, env, options)
