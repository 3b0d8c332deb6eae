"""Processes that torchrun, mpirun or srun started become one job, or none."""

from argparse import Namespace

import pytest
import torch
from helpers.training import make_config, make_trainer

from fairseq_tutel.hosts.fairseq import hooks, ranks

TORCHRUN = {
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}


@pytest.fixture
def cfg():
    config = make_config()
    config.distributed_training.distributed_world_size = 1
    return config


@pytest.mark.parametrize(
    "env, place",
    [
        (TORCHRUN, ranks.Started("torchrun", 1, 2)),
        (MPIRUN, ranks.Started("mpirun", 1, 3)),
        (SRUN, ranks.Started("srun", 1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ranks.Started("mpiexec", 0, 2)),
        ({**SRUN, **TORCHRUN}, ranks.Started("torchrun", 1, 2)),
        # alone: nothing, one process, or the batch script of a job with several tasks
        ({}, ranks.Started("", 0, 1)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, ranks.Started("", 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ranks.Started("", 0, 1)),
    ],
)
def test_who_started_this_process(env, place):
    assert ranks.started(env) == place


@pytest.mark.parametrize(
    "devices, cpu, device_id, backend",
    [(0, False, 0, "gloo"), (8, True, 0, "gloo"), (1, False, 0, "nccl"), (8, False, 1, "nccl")],
)
def test_processes_of_torchrun_become_one_job(monkeypatch, cfg, devices, cpu, device_id, backend):
    """Without a GPU, with --cpu, with one visible GPU per process, with all GPUs visible."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    cfg.common.cpu, distributed = cpu, cfg.distributed_training
    ranks.join_started_ranks(cfg, TORCHRUN)
    assert distributed.distributed_init_method == "env://" and distributed.distributed_no_spawn
    assert (distributed.distributed_rank, distributed.distributed_world_size) == (1, 2)
    assert (distributed.device_id, distributed.distributed_backend) == (device_id, backend)


@pytest.mark.parametrize("env", [{}, {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_alone_stays_alone(cfg, env):
    before = dict(cfg.distributed_training)
    ranks.join_started_ranks(cfg, env)
    assert dict(cfg.distributed_training) == before


def test_an_init_method_wins(cfg):
    cfg.distributed_training.distributed_init_method = "tcp://elsewhere:1"
    before = dict(cfg.distributed_training)
    ranks.join_started_ranks(cfg, TORCHRUN)
    assert dict(cfg.distributed_training) == before


def test_what_cannot_be_one_job_is_refused_with_the_command_that_works(monkeypatch, cfg):
    monkeypatch.setattr(ranks.sys, "argv", ["/bin/fairseq-train", "DATA", "--lr", "a b"])
    cfg.distributed_training.distributed_world_size = 3
    with pytest.raises(ValueError, match="--distributed-world-size 3, but torchrun started 2"):
        ranks.join_started_ranks(cfg, TORCHRUN)
    cfg.distributed_training.distributed_world_size = 1
    launcher = "-m fairseq_tutel.launch -- fairseq-train DATA --lr 'a b'"
    for env, words in (
        (SRUN, f"srun started 4 processes.*: srun \\[its options\\] python {launcher}$"),
        (MPIRUN, f"mpirun started 3 processes.*: mpirun \\[its options\\] python {launcher}$"),
    ):
        with pytest.raises(ValueError, match=words):
            ranks.join_started_ranks(cfg, env)
    # fairseq itself knows SLURM's variables where it sees several devices
    cfg.distributed_training.distributed_world_size = 4
    ranks.join_started_ranks(cfg, SRUN)


def test_a_trainer_that_would_be_one_of_two_is_refused(monkeypatch):
    """The last line of defence: Hydra's programs import the user dir too late to join."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    cfg = make_config()
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2 -m fairseq_tutel.launch --"):
        make_trainer(cfg)
    make_trainer(make_config(moe=False))  # a dense model does what it always did


def test_programs_that_join_are_those_that_run_experts_on_several_ranks(monkeypatch):
    joined = []
    monkeypatch.setattr(hooks.evaluation, "is_moe_checkpoint", lambda path: path == "moe.pt")
    monkeypatch.setattr(hooks.ranks, "join_started_ranks", joined.append)
    monkeypatch.setattr(hooks.blocks, "use_trained_block_size", lambda cfg: None)
    call_main = hooks._call_main(lambda cfg, main: main(cfg))

    def joins(program, cfg):
        joined.clear()
        names = {}
        exec(compile("def main(cfg): pass", f"/fairseq_cli/{program}.py", "exec"), names)
        call_main(cfg, names["main"])
        return bool(joined)

    assert joins("train", make_config())
    assert not joins("train", make_config(moe=False))
    cfg = make_config()
    for program, path, expected in (
        ("eval_lm", "moe.pt", True), ("validate", "moe.pt", True), ("eval_lm", "dense.pt", False),
        ("eval_lm", None, False), ("interactive", "moe.pt", False),
    ):  # fmt: skip
        cfg.common_eval.path = path
        assert joins(program, cfg) is expected, (program, path)
    cfg.generation.beam = 0
    with pytest.raises(ValueError, match="--beam 0 must be at least 1"):
        joins("interactive", cfg)


def test_generation_shares_the_data(monkeypatch):
    monkeypatch.setattr(ranks, "is_moe_checkpoint", lambda path: path == "moe.pt")
    seen = []
    main = ranks.share_of_data(
        lambda a: seen.append((a.distributed_rank, a.distributed_world_size))
    )

    def generate(path, env, **given):
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        alone = {"distributed_rank": 0, "distributed_world_size": 1, "results_path": None}
        main(Namespace(path=path, **{**alone, **given}))
        return seen.pop()

    assert generate("moe.pt", TORCHRUN) == (1, 2)
    assert generate("dense.pt:moe.pt", TORCHRUN) == (1, 2)  # an ensemble
    assert generate(None, TORCHRUN) == (0, 1)
    assert generate("dense.pt", TORCHRUN) == (0, 1)
    assert generate("moe.pt", {}) == (0, 1)
    assert generate("moe.pt", TORCHRUN, distributed_rank=3, distributed_world_size=4) == (3, 4)
    with pytest.raises(ValueError, match="--results-path out is one file, but torchrun started 2"):
        generate("moe.pt", TORCHRUN, results_path="out")
