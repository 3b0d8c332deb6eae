"""GPUs found, ranks placed and bound, and the whole plan of a job, on made-up machines."""

import os

import pytest
from launch_helpers import EIGHT_GPUS, TWO_SOCKETS, as_torch_lists, make_machine, variables

from fairseq_tutel.command_line.starters import Started
from fairseq_tutel.launch import machine
from fairseq_tutel.launch.cli import build_parser
from fairseq_tutel.launch.commands import parse_command
from fairseq_tutel.launch.job import prepare_job
from fairseq_tutel.launch.machine import Gpu, Topology, auto_bindings, parse_cpulist, visible_gpus

PCIS = list(EIGHT_GPUS)
GPUS = [Gpu(i, pci) for i, pci in enumerate(PCIS)]
SOCKETS = {node: set(parse_cpulist(text)) for node, text in TWO_SOCKETS.items()}
EVERY = set(range(32))
TRAIN, CPU = "python -m fairseq_cli.train data", "python -m fairseq_cli.train data --cpu"
GENERATE = "python -m fairseq_cli.generate data --path m"
# an sbatch script: SLURM_PROCID without a step
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
VISIBLE = {"CUDA_VISIBLE_DEVICES": "0,1"}
ONE, TWO = "--nproc-per-node 1", "--nproc-per-node 2"


def srun_task(rank, tasks, node, local):
    """Variables as SLURM 22.05 sets them for a task of a step on two nodes."""
    return variables(
        f"SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={tasks} "
        f"SLURM_NODEID={node} SLURM_LOCALID={local} SLURM_STEP_NUM_NODES=2 SLURM_NNODES=2 "
        "SLURM_NTASKS=4 SLURM_STEP_NODELIST=gpu[07-08] MASTER_ADDR=localhost"
    )


def mpi_rank(rank):
    place = {"RANK": rank, "SIZE": 8, "LOCAL_RANK": rank, "LOCAL_SIZE": 8}
    return {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in place.items()}


@pytest.fixture
def on_machine(monkeypatch):
    """Sets the CPUs that are allowed, and the GPUs that torch lists."""

    def have(allowed=EVERY, gpus=PCIS):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        monkeypatch.setattr(machine, "ask_torch", as_torch_lists(gpus))

    return have


@pytest.fixture
def root(tmp_path, on_machine):
    """A node with two sockets and 8 GPUs, and all of its 32 CPUs allowed."""
    on_machine()
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


def stated(rank, name):
    """What a rank has under a name: an option, a field of its own, or a variable."""
    if name.startswith("--"):
        return rank["argv"][rank["argv"].index(name) + 1] if name in rank["argv"] else "unset"
    own = {"cpus": machine.format_cpulist(rank["cpus"] or ()), "holds": str(rank["holds"])}
    return {**rank["env"], **own}.get(name, "unset")


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
        assert machine.format_cpulist(parse_cpulist(text)) == text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_ranks_on_the_cpu_split_the_cores_node_by_node(root, ranks):
    bound = auto_bindings(Topology(root, ()), EVERY, [None] * ranks)
    assert sorted(cpu for each in bound for cpu in each.cpus) == list(range(32))
    assert [each.threads for each in bound] == [len(each.cpus) // 2 for each in bound]
    assert max(each.threads for each in bound) - min(each.threads for each in bound) <= 1
    # only one of the slices may lie on both sockets
    on_both = [not any(set(each.cpus) <= cpus for cpus in SOCKETS.values()) for each in bound]
    assert sum(on_both) == ranks % 2


def test_ranks_with_gpus_share_the_cores_of_their_sockets(root):
    topology = Topology(root, ())
    bound = auto_bindings(topology, EVERY, GPUS)
    for each in bound:
        assert set(each.cpus) < SOCKETS[EIGHT_GPUS[each.gpu.pci_id]]
        # 2 of the socket's 8 cores, each with both threads; one OpenMP thread per core
        assert len(each.cpus) == 4 and each.threads == 2 == len({cpu % 16 for cpu in each.cpus})
    assert sorted(cpu for each in bound for cpu in each.cpus) == list(range(32))
    for allowed, gpus, wanted in (
        # a cpuset: two full cores on socket 0, two without siblings on socket 1
        ({2, 3, 18, 19, 12, 13}, GPUS[:3:2], [([2, 3, 18, 19], 2), ([12, 13], 2)]),
        ({0, 16, 1}, GPUS[:2] + GPUS[4:6], [([0, 1, 16], 1)] * 4),  # more ranks than cores
        (EVERY, [Gpu(0, None), Gpu(1, None)], [(sorted(SOCKETS[n]), 8) for n in (0, 1)]),
    ):
        bound = auto_bindings(topology, allowed, gpus)
        assert [(each.cpus, each.threads) for each in bound] == wanted
    bound = auto_bindings(topology, set(range(8)), GPUS[:3:2])  # not the second's socket
    assert bound[0].cpus == list(range(8)) and set(bound[1].cpus) <= set(range(8))
    assert "no allowed core in the GPU's NUMA node, 1" in str(bound[1])


def test_visible_gpus(root, plan, tmp_path, monkeypatch, on_machine):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, root) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, root) == []
    assert visible_gpus({}, tmp_path / "elsewhere") == []
    on_machine(gpus=[PCIS[2], "-"])
    assert visible_gpus({}, root) == [Gpu(0, PCIS[2]), Gpu(1, None)]
    # what is not used is not passed over in silence
    monkeypatch.undo()
    assert machine.ask_torch({"PYTHONHOME": "/nowhere"}) == ""  # as where torch cannot start
    on_machine(gpus=())
    job = plan("true")
    assert "torch lists no GPU" in job.summary and "CUDA_VISIBLE_DEVICES" not in job.ranks[0]["env"]
    assert "warning" not in plan("true", {"CUDA_VISIBLE_DEVICES": ""}).summary


def test_the_summary_and_the_place_of_a_job(plan):
    job = plan(TRAIN)
    head, *lines = job.summary.splitlines()
    assert head.startswith("8 ranks on 1 node (started by launcher), nccl on GPUs, MASTER_ADDR=")
    assert lines[0] == f"  local rank 0: GPU 0 ({PCIS[0]}), auto cores=0-1,16-17, 2 threads"
    assert len({rank["env"]["MASTER_PORT"] for rank in job.ranks}) == 1
    assert plan(TRAIN, {"OMP_NUM_THREADS": "7"}).summary.count(" 7 threads") == 8
    assert plan(TRAIN, srun_task(13, 16, 1, 5)).place.adopted
    # one task per node starts that node's ranks
    job, other = (plan(TRAIN, srun_task(node, 2, node, 0)) for node in (1, 0))
    assert job.place == Started("srun", 8, 16, 0, 8, 1, 2, False)
    assert job.ranks[0]["env"]["MASTER_PORT"] == other.ranks[0]["env"]["MASTER_PORT"]


DEFAULTS = {"CUDA_DEVICE_ORDER", "MASTER_ADDR", "NCCL_CTA_POLICY", "NCCL_IB_ADAPTIVE_ROUTING",
            "NCCL_LAUNCH_ORDER_IMPLICIT", "OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}  # fmt: skip
EIGHT, EIGHT_MORE = "0|1|2|3|4|5|6|7", "8|9|10|11|12|13|14|15"


@pytest.mark.parametrize(
    ("words", "options", "env", "wanted"),
    [
        # one rank per GPU, or as many as the command says, or none on GPUs
        (TRAIN, "", {}, f"RANK={EIGHT} LOCAL_RANK={EIGHT} --device-id={EIGHT}"),
        (f"{TRAIN} --distributed-world-size 4", "", {}, "RANK=0|1|2|3 OMP_NUM_THREADS=4|4|4|4"),
        (CPU, "--nproc-per-node 16", {},
         f"RANK={EIGHT}|{EIGHT_MORE} CUDA_VISIBLE_DEVICES={'|' * 15}"),
        (TRAIN, TWO, {}, "--distributed-backend=nccl|nccl WORLD_SIZE=2|2 holds=True|True "
         "MASTER_ADDR=127.0.0.1|127.0.0.1 CUDA_DEVICE_ORDER=PCI_BUS_ID|PCI_BUS_ID"),
        (f"{TRAIN} --distributed-port 1111", ONE, {}, "MASTER_PORT=1111"),
        ("python -m fairseq_cli.hydra_train a=b", ONE, {}, "holds=True"),
        ("python -m fairseq_cli.eval_lm d", ONE, {}, "holds=False"),
        ("python script.py", ONE, {}, "holds=False"),
        # communicators of one GPU are ordered; ranks on the CPU have huge pages
        (TRAIN, TWO, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=1|1 THP_MEM_ALLOC_ENABLE=unset|unset"),
        (TRAIN, ONE, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=unset"),
        (CPU, TWO, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=unset|unset THP_MEM_ALLOC_ENABLE=1|1"),
        (TRAIN, f"{ONE} --nccl-profile ib-adaptive-routing", {}, "NCCL_IB_ADAPTIVE_ROUTING=1"),
        (TRAIN, f"{ONE} --nccl-profile zero-sm", {},
         "NCCL_CTA_POLICY=2 FAIRSEQ_TUTEL_NCCL_PROFILE=zero-sm"),
        (TRAIN, f"{TWO} --bind none", {}, "FAIRSEQ_TUTEL_BIND=none|none OMP_NUM_THREADS=8|8"),
        # generate sees only its GPU
        (GENERATE, TWO, {}, "CUDA_VISIBLE_DEVICES=0|1 --distributed-init-method=unset|unset"),
        (GENERATE, TWO, {"CUDA_VISIBLE_DEVICES": "6,3"}, "CUDA_VISIBLE_DEVICES=6|3"),
        # tasks of srun; one that is alone on its node starts the node's ranks
        (TRAIN, "", srun_task(13, 16, 1, 5), "RANK=13 --distributed-rank=13 --device-id=5 "
         "cpus=6-7,22-23 MASTER_ADDR=localhost"),
        (TRAIN, "", srun_task(1, 2, 1, 0), f"RANK={EIGHT_MORE}"),
        # each local rank has its own list; a rank of srun checks only its own
        (TRAIN, f"{TWO} --bind 0-3,16-19:8", {}, "cpus=0-3,16-19|8 OMP_NUM_THREADS=4|1"),
        (TRAIN, f"--bind {'0-1:' * 5}8-9:0-1:0-1", srun_task(13, 16, 1, 5) | {"CPUS": "8-9"},
         "cpus=8-9 FAIRSEQ_TUTEL_BIND=given~cores=8-9"),
        # srun --gpus-per-task=1: every rank finds one GPU, and all eight could be on its socket
        (TRAIN, "", srun_task(6, 16, 0, 6) | {"GPU": PCIS[6]}, "--device-id=0 RANK=6 cpus=14,30"),
        # a starter's binding stands
        (TRAIN, "", srun_task(2, 16, 0, 2) | {"CPUS": "8-9,24-25"},
         "cpus=8-9,24-25 OMP_NUM_THREADS=2"),
        # mpirun binds to sockets by default: 4 of the 8 ranks share these 8 cores
        (TRAIN, "", mpi_rank(0) | {"CPUS": TWO_SOCKETS[0]},
         "OMP_NUM_THREADS=2 FAIRSEQ_TUTEL_BIND=mpirun's~cores=0-7,16-23"),
    ],
)  # fmt: skip
def test_what_ranks_find(plan, on_machine, words, options, env, wanted):
    on_machine(parse_cpulist(env.get("CPUS", "0-31")), [env["GPU"]] if "GPU" in env else PCIS)
    ranks = plan(words, env, options).ranks
    for name, values in variables(wanted).items():
        assert [stated(rank, name) for rank in ranks] == values.split("|"), name
        if name in DEFAULTS and "unset" not in values:  # a variable that is set wins
            assert plan(words, env | {name: "7"}, options).ranks[0]["env"][name] == "7"


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
        ({}, TWO + " --bind 0-3", "--bind 0-3: give a CPU list to each of 2 local ranks"),
        ({}, TWO + " --bind 0:1:2", "--bind 0:1:2: give a CPU list"),
        ({}, TWO + " --bind 0-3:", "--bind 0-3:: give a CPU list"),
        ({}, TWO + " --bind 3-0:1", "CPU list '3-0': cannot read '3-0'; choose auto, none, or"),
        ({}, TWO + " --bind 0:30-33", "rank 1 cannot use CPU 32-33; the launcher may use 0-31"),
    ],
)
def test_refused(plan, env, options, message):
    with pytest.raises(ValueError, match=message):
        plan(TRAIN, env, options)
