"""GPUs found, ranks placed, and the whole plan of a job on made-up machines."""

import os

import pytest
from launch_helpers import EIGHT_GPUS, make_machine, nvidia_smi, value_after

from fairseq_tutel.launch import binding, devices
from fairseq_tutel.launch.devices import Gpu, visible_gpus
from fairseq_tutel.launch.fairseq_commands import parse_command
from fairseq_tutel.launch.job import Job, Options, prepare_job
from fairseq_tutel.launch.placement import Placement

PCIS = list(EIGHT_GPUS)
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "MASTER_ADDR": "localhost",
}


def srun_task(procid, tasks, node, local, per_node):
    return {
        **SRUN,
        "SLURM_PROCID": str(procid),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x2)",
    }


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with two sockets and 8 GPUs, and all of its 32 CPUs allowed."""
    monkeypatch.setattr(devices, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(devices, "_run", nvidia_smi())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(binding, "cpuset", lambda allowed, topology: set(range(32)))
    return str(make_machine(tmp_path / "root"))


def plan(node, words, env=None, **options):
    env = {"PATH": os.environ["PATH"], **(env or {})}
    command = parse_command(words.split(), env["PATH"])
    return prepare_job(Options(root=node, **options), command, env)


TRAIN = "python -m fairseq_cli.train data"


def test_visible_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "torch_is_cpu_build", lambda: False)
    root, run = make_machine(tmp_path), nvidia_smi()
    assert visible_gpus({}, root, run) == [Gpu(i, pci) for i, pci in enumerate(PCIS)]
    # the order of the variable counts, by number or by the beginning of the UUID
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "5,2"}, root, run) == [
        Gpu(0, PCIS[5]),
        Gpu(1, PCIS[2]),
    ]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-33"}, root, run) == [Gpu(0, PCIS[3])]
    assert len(visible_gpus({"CUDA_VISIBLE_DEVICES": "0,99,1"}, root, run)) == 1
    for hidden in ("", "-1"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": hidden}, root, run) == []
    assert visible_gpus({}, tmp_path / "elsewhere", run) == []
    monkeypatch.setattr(devices, "torch_is_cpu_build", lambda: True)
    assert visible_gpus({}, root, run) == []


def test_gpus_that_cannot_be_used_are_not_passed_over_in_silence(tmp_path, monkeypatch):
    root = make_machine(tmp_path)
    monkeypatch.setattr(devices, "_run", lambda command, env: None)
    for is_cpu_build, message in ((True, "is a build for the CPU"), (False, "neither nvidia-smi")):
        monkeypatch.setattr(devices, "torch_is_cpu_build", lambda is_cpu=is_cpu_build: is_cpu)
        assert message in plan(str(root), "true").summary
        assert "CUDA_VISIBLE_DEVICES" not in plan(str(root), "true").ranks[0].env
        assert "warning" not in plan(str(root), "true", {"CUDA_VISIBLE_DEVICES": ""}).summary


def test_torch_is_asked_about_mig_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "torch_is_cpu_build", lambda: False)

    def run(command, env):
        if command[0] == "nvidia-smi":
            return nvidia_smi(mig="Enabled")(command, env)
        return "noise\nGPU 0000:48:00.0\nGPU -\n"

    gpus = visible_gpus({}, make_machine(tmp_path), run)
    assert gpus == [Gpu(0, "0000:48:00.0"), Gpu(1, None)]


def test_cpu_build_is_read_from_torchs_version_file(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()

    def spec(name):
        return type("Spec", (), {"submodule_search_locations": [str(package)]})

    monkeypatch.setattr(devices.importlib.util, "find_spec", spec)
    for text, is_cpu in (
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", False),
        ("cuda = None\nhip = '6.2'\n", False),
    ):
        (package / "version.py").write_text(text)
        assert devices.torch_is_cpu_build() is is_cpu


def test_auto_starts_one_rank_per_gpu(node):
    job = plan(node, TRAIN)
    assert [rank.rank for rank in job.ranks] == list(range(8))
    for i, rank in enumerate(job.ranks):
        assert value_after(rank.argv, "--device-id") == str(i) == rank.env["LOCAL_RANK"]
        assert value_after(rank.argv, "--distributed-backend") == "nccl"
        assert rank.env["OMP_NUM_THREADS"] == "2" and rank.env["WORLD_SIZE"] == "8"
        assert rank.binding.numa == (EIGHT_GPUS[list(EIGHT_GPUS)[i]],)
    assert {rank.env["MASTER_PORT"] for rank in job.ranks} == {job.ranks[0].env["MASTER_PORT"]}
    assert "8 ranks on 1 node (started by launcher), nccl on GPUs" in job.summary
    assert job.summary.count("\n") == 10  # a header, the table's two and 8 ranks


def test_auto_follows_the_commands_world_size(node):
    assert len(plan(node, TRAIN + " --distributed-world-size 4").ranks) == 4


def test_users_environment_wins(node):
    env = {
        "OMP_NUM_THREADS": "7",
        "MASTER_PORT": "1234",
        "NCCL_IB_SL": "9",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }
    job = plan(node, TRAIN, env, nccl_profile="ib-adaptive-routing,sl=1")
    given = job.ranks[0].env
    assert {key: given[key] for key in env} == env
    assert given["NCCL_IB_ADAPTIVE_ROUTING"] == "1"


def test_communicators_of_one_gpu_are_ordered(node):
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    assert {rank.env[name] for rank in plan(node, TRAIN).ranks} == {"1"}
    assert plan(node, TRAIN, {name: "0"}).ranks[0].env[name] == "0"
    assert name not in plan(node, TRAIN + " --cpu", nproc_per_node=2).ranks[0].env
    assert name not in plan(node, TRAIN, nproc_per_node=1).ranks[0].env


def test_one_hardware_queue_and_overlap_do_not_fit(node, tmp_path):
    one, warning = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 lets"
    overlapped = TRAIN + " --moe-overlap-degree 4"
    assert warning in plan(node, overlapped, one).summary
    assert "overlap degree 4" in plan(node, overlapped, one).summary
    assert warning not in plan(node, overlapped, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}).summary
    assert warning not in plan(node, overlapped).summary
    assert warning not in plan(node, TRAIN, one).summary
    assert warning not in plan(node, TRAIN + " --moe-overlap-degree 1", one).summary
    (tmp_path / "own.yaml").write_text("model:\n  moe_overlap_degree: 2\n", encoding="utf-8")
    hydra = f"fairseq-hydra-train --config-dir {tmp_path} --config-name own"
    assert "overlap degree 2" in plan(node, hydra, one).summary
    override = hydra + " model.moe_overlap_degree=1"
    assert warning not in plan(node, override, one).summary


def test_threads_in_effect_are_in_the_table(node):
    assert "environment" not in plan(node, TRAIN).summary
    table = plan(node, TRAIN, {"OMP_NUM_THREADS": "7"}).summary
    assert table.count(" 7 (from the environment)") == 8


def test_torchruns_one_thread_is_nobodys_choice(node):
    env = {
        "RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }
    assert plan(node, TRAIN, env).ranks[0].env["OMP_NUM_THREADS"] == "1"
    env["TORCHELASTIC_RUN_ID"] = "none"
    job = plan(node, TRAIN, env)
    assert job.ranks[0].env["OMP_NUM_THREADS"] == "2" and "environment" not in job.summary
    env["OMP_NUM_THREADS"] = "3"
    assert plan(node, TRAIN, env).ranks[0].env["OMP_NUM_THREADS"] == "3"


def test_ranks_find_how_they_were_bound_for_the_record(node):
    names = "FAIRSEQ_TUTEL_BIND", "FAIRSEQ_TUTEL_NCCL_PROFILE"

    def record(**options):
        given = plan(node, TRAIN, **options).ranks[0].env
        return tuple(given[name] for name in names)

    assert record() == ("auto cores=0-1,16-17 memory=0", "none")
    profile = "ib-adaptive-routing,sl=1"
    assert record(bind="none", nccl_profile=profile) == ("none", profile)
    assert record(bind="3,4", nproc_per_node=2)[0] == "explicit cores=3 memory=0"


def test_huge_pages_for_ranks_on_the_cpu(node):
    assert "THP_MEM_ALLOC_ENABLE" not in plan(node, TRAIN).ranks[0].env
    words = TRAIN + " --cpu"
    assert plan(node, words).ranks[0].env["THP_MEM_ALLOC_ENABLE"] == "1"
    env = {"THP_MEM_ALLOC_ENABLE": "0"}
    assert plan(node, words, env).ranks[0].env["THP_MEM_ALLOC_ENABLE"] == "0"


def test_more_ranks_than_gpus(node):
    with pytest.raises(ValueError, match="9 ranks on this node but 8 visible GPUs: start fewer"):
        plan(node, TRAIN, nproc_per_node=9)
    with pytest.raises(ValueError, match=r"4 ranks on this node but 2 .*CUDA_VISIBLE_DEVICES=0,1"):
        plan(node, TRAIN, {"CUDA_VISIBLE_DEVICES": "0,1"}, nproc_per_node=4)
    job = plan(node, TRAIN + " --cpu", nproc_per_node=16)
    assert all(rank.env["CUDA_VISIBLE_DEVICES"] == "" for rank in job.ranks)


def test_generate_sees_only_its_gpu(node):
    ranks = plan(node, "python -m fairseq_cli.generate data --path m", nproc_per_node=2).ranks
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]
    assert all("--distributed-init-method" not in rank.argv for rank in ranks)
    ranks = plan(node, "python -m fairseq_cli.generate data", {"CUDA_VISIBLE_DEVICES": "6,3"}).ranks
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["6", "3"]


def test_adopted_rank_of_srun(node):
    job = plan(node, TRAIN, srun_task(13, 16, 1, 5, 8))
    (rank,) = job.ranks
    assert job.placement.adopted and rank.rank == 13
    assert value_after(rank.argv, "--distributed-rank") == "13"
    assert value_after(rank.argv, "--device-id") == "5"
    assert rank.binding.numa == (0,) and len(rank.binding.cpus) == 4
    assert rank.env["MASTER_ADDR"] == "localhost"


def test_adopted_rank_that_sees_only_its_gpu(node, monkeypatch):
    # srun --gpus-per-task=1: every rank finds one GPU, its own, as number 0
    monkeypatch.setattr(devices, "_run", nvidia_smi([list(EIGHT_GPUS)[6]]))
    (rank,) = plan(node, TRAIN, srun_task(6, 16, 0, 6, 8)).ranks
    assert value_after(rank.argv, "--device-id") == "0"
    assert value_after(rank.argv, "--distributed-rank") == "6"
    assert rank.binding.numa == (1,)
    # it shares socket 1 with three other GPUs and takes a quarter of its cores
    assert rank.binding.cpus == (12, 13, 28, 29)


def test_one_task_per_node_starts_that_nodes_ranks(node):
    job = plan(node, TRAIN, srun_task(1, 2, 1, 0, 1))
    assert not job.placement.adopted and job.placement.source == "srun"
    assert [rank.rank for rank in job.ranks] == list(range(8, 16))
    assert (
        job.ranks[0].env["MASTER_PORT"]
        == plan(node, TRAIN, srun_task(0, 2, 0, 0, 1)).ranks[0].env["MASTER_PORT"]
    )


def test_a_starters_binding_stands_unless_off_the_gpus_socket(node, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9, 24, 25})  # socket 1
    (rank,) = plan(node, TRAIN, srun_task(2, 16, 0, 2, 8)).ranks  # GPU 2 is there, too
    assert rank.binding.cpus == (8, 9, 24, 25) and rank.binding.threads == 2
    assert rank.binding.note == "bound by srun"
    (rank,) = plan(node, TRAIN, srun_task(0, 16, 0, 0, 8)).ranks  # GPU 0 is on socket 0
    assert rank.binding.numa == (0,) and rank.binding.note == ""


def test_a_shared_set_of_cores_is_divided_among_threads(node, monkeypatch):
    # mpirun binds to sockets by default: 4 of the 8 ranks share these 8 cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)) | set(range(16, 24)))
    env = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    }
    (rank,) = plan(node, TRAIN, env).ranks
    assert rank.env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    "env, options, message",
    [
        (
            {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
            {},
            "the SLURM job has 2 nodes, but this is no task of a step",
        ),
        ({}, {"nnodes": 2}, "--nnodes 2 needs --node-rank"),
        ({}, {"nnodes": 2, "node_rank": 1, "nproc_per_node": 1}, "host of rank 0 is unknown"),
        (srun_task(1, 4, 0, 1, 2), {"nnodes": 3}, "--nnodes 3 contradicts srun, which states 2"),
        (srun_task(1, 4, 0, 1, 2), {"nproc_per_node": 4}, "--nproc-per-node 4 contradicts srun"),
        ({}, {"bind": "0-3"}, "1 sets of CPUs for 8 ranks"),
        ({}, {"nccl_profile": "fast"}, "known are"),
    ],
)
def test_refused(node, env, options, message):
    with pytest.raises(ValueError, match=message):
        plan(node, TRAIN, env, **options)


def test_ports_must_agree(node):
    words = TRAIN + " --distributed-port 1111"
    assert plan(node, words).ranks[0].env["MASTER_PORT"] == "1111"
    with pytest.raises(ValueError, match="--distributed-port 1111 contradicts --master-port 2222"):
        plan(node, words, master_port=2222)


def test_experts_against_ranks(node):
    with pytest.raises(ValueError, match="--moe-expert-count=12 and a world size of 8"):
        plan(node, TRAIN + " --moe-expert-count 12")


def test_binding_can_be_chosen(node):
    ranks = plan(node, TRAIN, bind="0-1,2-3", nproc_per_node=2).ranks
    assert [rank.binding.cpus for rank in ranks] == [(0, 1), (2, 3)]
    ranks = plan(node, TRAIN, bind="none").ranks
    assert all(rank.binding.cpus is None and rank.env["OMP_NUM_THREADS"] == "2" for rank in ranks)


@pytest.mark.parametrize(
    "source, adopted, world, local, nodes, talks",
    [
        ("launcher", False, 4, 2, 2, True),
        ("srun", True, 2, 1, 2, True),
        ("srun", True, 4, 2, 2, False),
        # one rank beside two: every rank must come to the same answer
        ("srun", True, 3, 1, 2, False),
        ("srun", True, 3, 2, 2, False),
        ("mpirun", True, 3, 1, 3, False),
        ("torchrun", True, 2, 1, 2, False),
    ],
)
def test_nodes_compare_notes_where_each_has_one_launcher(
    source, adopted, world, local, nodes, talks
):
    placement = Placement(source, adopted, 0, world, 0, local, 0, nodes)
    job = Job(placement, parse_command(["fairseq-train"]), [], "", cpu=True)
    assert (job.report is not None) == talks


def test_a_request_to_save_waits_for_ranks_that_will_take_it(node, tmp_path):
    hydra = "python -m fairseq_cli.hydra_train task.data=d"
    (tmp_path / "own.yaml").write_text("common:\n  user_dir: /there/fairseq_tutel\n")
    from_file = f"{hydra} --config-dir {tmp_path} --config-name own"
    for words, early in (
        (f"{TRAIN} --user-dir /some/where/fairseq_tutel/", "held"),
        (f"{hydra} common.user_dir=fairseq_tutel", "held"),
        (from_file, "held"),
        (f"{from_file} common.user_dir=mine", "ignored"),
        (f"{TRAIN} --user-dir mine", "ignored"),
        (TRAIN, "ignored"),
        ("python -m fairseq_cli.eval_lm d --user-dir fairseq_tutel", "held"),
        ("python -m fairseq_cli.eval_lm d", "default"),
        ("python script.py --user-dir fairseq_tutel", "default"),
    ):
        assert plan(node, words, nproc_per_node=1).early_request == early, words
