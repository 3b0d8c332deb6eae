"""Commands recognised, GPUs found, ranks placed and bound: plans of jobs on made-up machines."""

import os
import sys

import pytest
from helpers.commands import variables

from fairseq_tutel.command_line.starters import Started
from fairseq_tutel.launch import machine
from fairseq_tutel.launch.cli import build_parser
from fairseq_tutel.launch.commands import parse_command
from fairseq_tutel.launch.job import prepare_job
from fairseq_tutel.launch.machine import Gpu, Topology, format_cpulist, parse_cpulist

# Two sockets of 8 cores with 2 threads each, and 8 GPUs: the usual layout of an HGX node, in small.
# Thread siblings are N and N + 16. GPUs 0, 1, 4, 5 are on socket 0: their order does not tell.
SOCKETS = {0: "0-7,16-23", 1: "8-15,24-31"}
PCIS = [f"0000:{bus}:00.0" for bus in ("07", "0b", "48", "4c", "88", "8b", "c8", "cb")]
GPUS, ON = [Gpu(i, pci) for i, pci in enumerate(PCIS)], [0, 0, 1, 1] * 2
FAR = "(no allowed core in the GPU's NUMA node, {})"
HIDDEN, ONE, TWO = {"CUDA_VISIBLE_DEVICES": ""}, "--nproc-per-node 1", "--nproc-per-node 2"
# an sbatch script: SLURM_PROCID without a step
BATCH = variables("SLURM_JOB_ID=17 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2")
MPI = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "8")
MPI |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
T, J = "fairseq-train", "fairseq-hydra-train"
PROGRAMS = ("train", "eval-lm", "validate", "hydra-train", "generate", "interactive", "mytool")
CONFIGS = {
    "small": "common:\n  cpu: true\n  dir: x\nmodel:\n  cpu: false\nhydra:\n  verbose: true\n",
    "big": "common:\n  cpu: false\nother:\n  cpu: true\n",
    "away": "hydra:\n  run:\n    dir: /elsewhere\n",
    "moved": "hydra:\n  # why\n  job:\n    chdir: true\n",
    "quiet": "defaults:\n- hydra/job_logging: none\n",
    "torn": "model: [",
}


def srun_task(rank, tasks, node, local, **more):
    """Variables as SLURM 22.05 sets them for a task of a step on two nodes."""
    return more | variables(
        f"SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={tasks} "
        f"SLURM_NODEID={node} SLURM_LOCALID={local} SLURM_STEP_NUM_NODES=2 SLURM_NNODES=2 "
        "SLURM_NTASKS=4 SLURM_STEP_NODELIST=gpu[07-08] MASTER_ADDR=localhost"
    )


def make_machine(root, numa, gpus):
    """Write NUMA nodes {number: cpulist} and GPUs {PCI id: NUMA node} below ``root``."""
    files = {f"sys/devices/system/node/node{node}/cpulist": text for node, text in numa.items()}
    for cpu in parse_cpulist(",".join(numa.values())):
        siblings = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[siblings] = f"{cpu % 16},{cpu % 16 + 16}"
    for i, (pci, node) in enumerate(gpus.items()):
        files |= {f"sys/bus/pci/devices/{pci}/numa_node": str(node), f"dev/nvidia{i}": ""}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (root / "sys/class/net/lo").mkdir(parents=True)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Empty files as commands, configs, and below root a node with two sockets and 8 GPUs."""
    folder = tmp_path_factory.mktemp("launch")
    make_machine(folder / "root", SOCKETS, dict(zip(PCIS, ON, strict=True)))
    for name in (*(f"fairseq-{name}" for name in PROGRAMS), "python"):
        (folder / name).touch(mode=0o755)
    for name in ("fairseq_cli", "mine"):
        (folder / name).mkdir()
    (folder / "fairseq_cli" / "train.py").touch()
    for name, config in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(config)
    return folder


@pytest.fixture
def plan(folder, monkeypatch):
    """Returns the job of a command, the launcher's options and variables.

    Variables CPUS and GPUS are of the machine: what is allowed, and what torch lists if visible.
    """
    monkeypatch.chdir(folder)

    def make(words, env=None, options=""):
        env = {"CPUS": "0-31", "GPUS": " ".join(PCIS), **(env or {})}

        def ask(env):
            visible, gpus = env.get("CUDA_VISIBLE_DEVICES"), env["GPUS"].split()
            chosen = gpus if visible is None else [gpus[int(i)] for i in visible.split(",")]
            return "".join(f"GPU {pci}\n" for pci in chosen)

        monkeypatch.setattr(machine, "ask_torch", ask)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*parse_cpulist(env["CPUS"])})
        given = build_parser().parse_args([*options.split(), "--", *words.split()])
        given.root = str(folder / "root")
        return prepare_job(given, parse_command(given.command[1:], str(folder)), env)

    return make


def stated(rank, name):
    """What a rank has under a name: an option, a field of its own, or a variable."""
    if name.startswith("--"):
        return rank["argv"][rank["argv"].index(name) + 1] if name in rank["argv"] else "unset"
    own = {"cpus": format_cpulist(rank["cpus"] or ()), "holds": str(rank["holds"])}
    return {**rank["env"], **own}.get(name, "unset")


STAY = ["hydra.run.dir=.", "hydra.output_subdir=null",
        "hydra.job_logging.handlers.file.filename=/dev/null"]  # fmt: skip
W, B = "--distributed-world-size", "--distributed-backend"
MEET = "--distributed-init-method env:// --distributed-rank 1 --distributed-no-spawn"
D, OWN = "distributed_training", f"{J} --config-dir . -cn"
H = f"{D}.distributed"
MEET_IN_HYDRA = f"""{D}.device_id=1 {H}_init_method=env:// {H}_rank=1
    {H}_no_spawn=true {H}_backend=gloo common.cpu=true {" ".join(STAY)}"""
HYDRA, STAYS = f"{H}_world_size=2 {MEET_IN_HYDRA}", " ".join(STAY)
ALONE = f"{H}_world_size=1 {D}.device_id=0"
CPU = f"{ALONE} common.cpu=true {H}_backend=gloo"


@pytest.mark.parametrize(
    ("text", "ranks", "env", "added"),
    [
        ("fairseq-train d {}", 2, HIDDEN, f"{W} 2 --device-id 1 {MEET} {B} gloo --cpu"),
        ("fairseq-train d {}", 2, {}, f"{W} 2 --device-id 1 {MEET} {B} nccl"),
        ("fairseq-train --cpu d {}", 1, {}, f"{W} 1 --device-id 0 {B} gloo"),
        ("python -m fairseq_cli.train d {}", 1, {}, f"{W} 1 --device-id 0"),
        # fairseq 0.12.2 makes a process group of the rank that RANK and WORLD_SIZE tell of
        ("python -u -X dev -m fairseq_cli.eval_lm d {}", 1, HIDDEN,
         f"{W} 1 --device-id 0 --cpu {B} gloo"),
        ("fairseq-validate d {}", 1, {}, f"{W} 1 --device-id 0"),
        ("fairseq-generate d {}", 2, HIDDEN, f"{W} 2 --distributed-rank 1 --cpu"),
        ("fairseq-generate d --results-path o {}", 1, {}, f"{W} 1 --distributed-rank 0"),
        ("fairseq-interactive d {}", 1, HIDDEN, f"{W} 1 --cpu {B} gloo"),
        ("fairseq_cli/train.py d {}", 1, {}, f"{W} 1 --device-id 0"),  # with this interpreter
        # other programs
        *((f"{program} d {W} 7 {{}}", 2, HIDDEN, "") for program in (
            "python -m fairseq_cli.preprocess", "python -m my.fairseq_cli.train", "fairseq-mytool",
            "fairseq-mytool fairseq-train")),
        # the user's options win
        (f"fairseq-train {B}=gloo --distributed-init-method tcp://h:1 --cpu {W} 02 {{}}", 2, {},
         "--device-id 1 --distributed-rank 1 --distributed-no-spawn"),
        # Hydra takes one block of overrides, and a flag's value can look like one
        (f"{J} task.data=x m.y=2 {{}} --job n", 2, HIDDEN, HYDRA),
        ("python /src/fairseq_cli/hydra_train.py --job a=b {}", 2, HIDDEN, HYDRA),
        (f"{J} x=1 {{}} --job a=b", 2, HIDDEN, HYDRA),
        (f"{J} {H}_world_size=${{{{x}}}} {{}}", 2, HIDDEN, MEET_IN_HYDRA),  # Hydra's to resolve
        # Hydra's own default is a directory of its own for every rank
        (f"{OWN} small {{}}", 1, {}, f"{CPU} {STAYS}"),
        (f"{OWN} big {{}}", 1, {}, f"{ALONE} {STAYS}"),
        (f"{OWN} small common.cpu=false {{}}", 1, {}, f"{ALONE} {STAYS}"),
        (f"{OWN} away common.cpu=True {{}}", 1, {}, f"{ALONE} {H}_backend=gloo"),
        (f"{OWN} moved {{}}", 1, HIDDEN, CPU),
        (f"{OWN} quiet {{}}", 1, HIDDEN, " ".join([CPU, *STAY[:2]])),
        (f"{OWN} small hydra.run.dir=/d {{}}", 1, {}, CPU),
        (f"{OWN} small +hydra.job.chdir=true {{}}", 1, {}, CPU),
        (f"{OWN} small --multirun model.x=1,2 {{}}", 1, {}, CPU),
        (f"{OWN} small hydra.output_subdir=log {{}}", 1, {}, " ".join([CPU, *STAY[::2]])),
        # Hydra's to find
        (f"{J} --config-dir pkg://a --config-name b {{}}", 1, {}, f"{ALONE} {STAYS}"),
        (f"{J} --config-path a --config-name b {{}}", 1, HIDDEN, f"{CPU} {STAYS}"),
    ],
)  # fmt: skip
def test_what_a_rank_gets(plan, text, ranks, env, added):
    argv = plan(text.format(""), env, f"--nproc-per-node {ranks}").ranks[-1]["argv"]
    words, script = text.format(added).split(), text.startswith("fairseq_cli/")
    assert argv[1:] == words[0 if script else 1 :] and (argv[0] == sys.executable) == script


@pytest.mark.parametrize(
    ("allowed", "gpus", "wanted"),
    [
        # slices of whole cores, of which only one lies on both sockets; one thread per core
        ("0-31", [None], "0-31 16"),
        ("0-31", [None] * 2, "0-7,16-23 8 8-15,24-31 8"),
        ("0-31", [None] * 3, "0-4,16-20 5 5-9,21-25 5 10-15,26-31 6"),
        ("0-31", [None] * 4, "0-3,16-19 4 4-7,20-23 4 8-11,24-27 4 12-15,28-31 4"),
        ("0-31", [None] * 16, " ".join(f"{n},{n + 16} 1" for n in range(16))),
        # 2 of the 8 cores of the GPU's socket
        ("0-31", GPUS, "0-1,16-17 2 2-3,18-19 2 8-9,24-25 2 10-11,26-27 2 "
         "4-5,20-21 2 6-7,22-23 2 12-13,28-29 2 14-15,30-31 2"),
        # a cpuset: two full cores on socket 0, two without siblings on socket 1
        ("2-3,12-13,18-19", GPUS[:3:2], "2-3,18-19 2 12-13 2"),
        ("0-1,16", GPUS[:2] + GPUS[4:6], " ".join(["0-1,16 1"] * 4)),  # more ranks than cores
        *(("0-31", [Gpu(0, pci)], f"0-31 16 {FAR.format(None)}") for pci in (None, "0000:ff:00.0")),
        ("0-7", GPUS[:3:2], f"0-7 8 4-7 4 {FAR.format(1)}"),
    ],
)  # fmt: skip
def test_ranks_are_bound_to_the_cores_of_their_gpus_or_to_slices(folder, allowed, gpus, wanted):
    topology = Topology(folder / "root", ())
    bound = machine.auto_bindings(topology, {*parse_cpulist(allowed)}, gpus)
    found = (f"{format_cpulist(each.cpus)} {each.threads} {each.how}" for each in bound)
    assert " ".join(found).replace(" auto", "") == wanted


def test_machines_that_tell_less(tmp_path):
    one = Topology(make_machine(tmp_path / "one", {0: "0-3"}, {PCIS[0]: -1}), ())
    assert one.node_of(GPUS[0]) == 0  # of one node the kernel writes minus one
    assert Topology(tmp_path / "bare", [3, 1]).numa_cpus == {0: [1, 3]}
    assert format_cpulist(parse_cpulist("")) == ""


def test_the_summary_and_the_place_of_a_job(plan, monkeypatch):
    job = plan(T)
    head, *lines = job.summary.splitlines()
    assert head.startswith("8 ranks on 1 node (started by launcher), nccl on GPUs, MASTER_ADDR=")
    assert lines[0] == f"  local rank 0: GPU 0 ({PCIS[0]}), auto cores=0-1,16-17, 2 threads"
    assert len({rank["env"]["MASTER_PORT"] for rank in job.ranks}) == 1
    assert plan(T, {"OMP_NUM_THREADS": "7"}).summary.count(" 7 threads") == 8
    assert plan(T, srun_task(13, 16, 1, 5)).place.adopted
    assert "gloo on the CPU" in plan(f"{J} --config-name tiny_cpu").summary
    # one task per node starts that node's ranks
    job, other = (plan(T, srun_task(node, 2, node, 0)) for node in (1, 0))
    assert job.place == Started("srun", 8, 16, 0, 8, 1, 2, False)
    assert job.ranks[0]["env"]["MASTER_PORT"] == other.ranks[0]["env"]["MASTER_PORT"]
    unknown = plan(T, {"GPUS": f"{PCIS[2]} -"}).summary
    assert f"GPU 0 ({PCIS[2]})" in unknown and "GPU 1 (?)" in unknown
    # what is not used is not passed over in silence
    job = plan("fairseq-mytool", {"GPUS": ""})
    assert "torch lists no GPU" in job.summary and "CUDA_VISIBLE_DEVICES" not in job.ranks[0]["env"]
    for hidden in ("", "-1"):
        hides = plan("fairseq-mytool", {"CUDA_VISIBLE_DEVICES": hidden}).summary
        assert "warning" not in hides and "gloo" in hides
    monkeypatch.undo()
    assert machine.ask_torch({"PYTHONHOME": "/nowhere"}) == ""  # as where torch cannot start


DEFAULTS = {"CUDA_DEVICE_ORDER", "MASTER_ADDR", "NCCL_CTA_POLICY", "NCCL_IB_ADAPTIVE_ROUTING",
            "NCCL_LAUNCH_ORDER_IMPLICIT", "OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}  # fmt: skip
EIGHT, EIGHT_MORE = "0|1|2|3|4|5|6|7", "8|9|10|11|12|13|14|15"


@pytest.mark.parametrize(
    ("words", "options", "env", "wanted"),
    [
        # one rank per GPU, or as many as the command says, or none on GPUs
        (T, "", {}, f"RANK={EIGHT} LOCAL_RANK={EIGHT} --device-id={EIGHT}"),
        (f"{T} --distributed-world-size 4", "", {}, "RANK=0|1|2|3 OMP_NUM_THREADS=4|4|4|4"),
        (f"{T} --cpu", "--nproc-per-node 16", {},
         f"RANK={EIGHT}|{EIGHT_MORE} CUDA_VISIBLE_DEVICES={'|' * 15}"),
        (T, TWO, {}, "--distributed-backend=nccl|nccl WORLD_SIZE=2|2 holds=True|True "
         "MASTER_ADDR=127.0.0.1|127.0.0.1 CUDA_DEVICE_ORDER=PCI_BUS_ID|PCI_BUS_ID"),
        (f"{T} --distributed-port 1111", ONE, {}, "MASTER_PORT=1111"),
        ("fairseq-hydra-train a=b", ONE, {}, "holds=True"),
        ("fairseq-eval-lm d", ONE, {}, "holds=False"),
        ("python script.py", ONE, {}, "holds=False"),
        # communicators of one GPU are ordered; ranks on the CPU have huge pages
        (T, TWO, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=1|1 THP_MEM_ALLOC_ENABLE=unset|unset"),
        (T, ONE, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=unset"),
        (f"{T} --cpu", TWO, {}, "NCCL_LAUNCH_ORDER_IMPLICIT=unset|unset THP_MEM_ALLOC_ENABLE=1|1"),
        (T, f"{ONE} --nccl-profile ib-adaptive-routing", {}, "NCCL_IB_ADAPTIVE_ROUTING=1"),
        (T, f"{ONE} --nccl-profile zero-sm", {},
         "NCCL_CTA_POLICY=2 FAIRSEQ_TUTEL_NCCL_PROFILE=zero-sm"),
        (T, f"{TWO} --bind none", {}, "FAIRSEQ_TUTEL_BIND=none|none OMP_NUM_THREADS=8|8"),
        # generate sees only its GPU
        ("fairseq-generate d", TWO, {}, "CUDA_VISIBLE_DEVICES=0|1"),
        ("fairseq-generate d", TWO, {"CUDA_VISIBLE_DEVICES": "6,3"}, "CUDA_VISIBLE_DEVICES=6|3"),
        # tasks of srun; one that is alone on its node starts the node's ranks
        (T, "", srun_task(13, 16, 1, 5), "RANK=13 --distributed-rank=13 --device-id=5 "
         "cpus=6-7,22-23 MASTER_ADDR=localhost"),
        (T, "", srun_task(1, 2, 1, 0), f"RANK={EIGHT_MORE}"),
        # each local rank has its own list; a rank of srun checks only its own
        (T, f"{TWO} --bind 0-3,16-19:8", {}, "cpus=0-3,16-19|8 OMP_NUM_THREADS=4|1"),
        (T, f"--bind {'0-1:' * 5}8-9:0-1:0-1", srun_task(13, 16, 1, 5, CPUS="8-9"),
         "cpus=8-9 FAIRSEQ_TUTEL_BIND=given~cores=8-9"),
        # srun --gpus-per-task=1: every rank finds one GPU, and all eight could be on its socket
        (T, "", srun_task(6, 16, 0, 6, GPUS=PCIS[6]), "--device-id=0 RANK=6 cpus=14,30"),
        # a starter's binding stands
        (T, "", srun_task(2, 16, 0, 2, CPUS="8-9,24-25"),
         "cpus=8-9,24-25 OMP_NUM_THREADS=2"),
        # mpirun binds to sockets by default: 4 of the 8 ranks share these 8 cores
        (T, "", MPI | {"CPUS": SOCKETS[0]},
         "OMP_NUM_THREADS=2 FAIRSEQ_TUTEL_BIND=mpirun's~cores=0-7,16-23"),
    ],
)  # fmt: skip
def test_what_ranks_find(plan, words, options, env, wanted):
    ranks = plan(words, env, options).ranks
    for name, values in variables(wanted).items():
        assert [stated(rank, name) for rank in ranks] == values.split("|"), name
        if name in DEFAULTS and "unset" not in values:  # a variable that is set wins
            assert plan(words, env | {name: "7"}, options).ranks[0]["env"][name] == "7"


TASK, BIND = srun_task(1, 4, 0, 1), f"{TWO} --bind"


@pytest.mark.parametrize(
    ("message", "given"),
    [
        # words of the error; the command, the launcher's options and variables
        ("the SLURM job has 2 nodes, but this is no task of a step", (T, "", BATCH)),
        ("--nnodes 2 needs --node-rank", (T, "--nnodes 2")),
        ("launcher: rank 8 is not below world_size 8", (T, "--node-rank 1")),
        ("host of rank 0 is unknown", (T, f"--nnodes 2 --node-rank 1 {ONE}")),
        ("--nnodes 3 contradicts srun, which states 2", (T, "--nnodes 3", TASK)),
        ("--nproc-per-node 4 contradicts srun", (T, "--nproc-per-node 4", TASK)),
        ("srun: 3 tasks on 2 nodes: start equally many on", (T, "", srun_task(1, 3, 0, 1))),
        ("srun: local_rank 2 is not below local_world_size 2", (T, "", srun_task(2, 4, 0, 2))),
        ("9 ranks on this node but 8 visible GPUs: start fewer", (T, "--nproc-per-node 9")),
        ("2 visible GPUs (CUDA_VISIBLE_DEVICES=0,1)",
         (T, "--nproc-per-node 4", {"CUDA_VISIBLE_DEVICES": "0,1"})),
        ("--bind 0-3: give a CPU list to each of 2 local ranks", (T, f"{BIND} 0-3")),
        ("--bind 0:1:2: give a CPU list", (T, f"{BIND} 0:1:2")),
        ("--bind 0-3:: give a CPU list", (T, f"{BIND} 0-3:")),
        ("CPU list '3-0': cannot read '3-0'; choose auto, none, or", (T, f"{BIND} 3-0:1")),
        ("rank 1 cannot use CPU 32-33; the launcher may use 0-31", (T, f"{BIND} 0:30-33")),
        ("no command given", [""]),
        ("cannot find the command 'no-such-tool'", ["no-such-tool"]),
        (f"{W} x: not a number", [f"{T} {W} x"]),
        (f"{W}=4 contradicts the number of ranks started (2)", [f"{T} {W} 4"]),
        ("rank=1 contradicts the rank of this process (0)", [f"{T} --distributed-rank=1"]),
        ("--device-id=1 contradicts the GPU of this rank", [f"{T} --device-id 1"]),
        ("--device-id=1 contradicts the GPU of this rank", [f"{T} --local_rank 1"]),
        ("distributed_world_size=4 contradic", [f"{J} {H}_world_size=4"]),
        ("no_spawn=false contradicts", [f"{J} ++{H}_no_spawn=false"]),
        ("=3 contradicts", [f"fairseq-generate {W} 3"]),
        ("-path o is one file, which each of 2 ranks", ["fairseq-generate d --results-path o"]),
        ("fairseq-interactive runs in one process", ["fairseq-interactive d"]),
        ("=false, but this machine has no usable GPU", (f"{J} common.cpu=false", "", HIDDEN)),
        ("--user-dir no: there is no such folder", [f"{T} d --user-dir no"]),
        ("no such folder", [f"{T} d --user-dir examples/none"]),
        ("add --user-dir fairseq_tutel", [f"{T} d --arch transformer_lm_gpt_moe"]),
        ("such file in . (there are: away, big, moved, quiet, small, torn)", [f"{OWN} huge"]),
        ("--config-name nosuch: no such file in ", [f"{J} --config-name nosuch"]),
        ("--config-dir /nosuch: there is no such folder", [f"{J} --config-dir /nosuch"]),
        ("torn.yaml: while parsing", [f"{OWN} torn"]),
        ("", [f"{T} --distributed-no-spawn d"]),
        ("", [f"{T} d --user-dir mine --arch transformer_lm_gpt_moe"]),
        ("", [f"{T} d --user-dir fairseq_tutel --arch transformer_moe_base"]),
    ],
)  # fmt: skip
def test_refused(plan, message, given):
    (words, options, env), said = (*given, *("", TWO, {})[len(given) :]), ""
    try:
        plan(words, env, options)
    except ValueError as error:
        said = str(error)
    assert message in said and bool(said) == bool(message), said
