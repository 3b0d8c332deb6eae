"""Processes that torchrun, mpirun or srun started become one job, or none."""

from contextlib import nullcontext

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.training import make_config, make_trainer, named, own_batches

from fairseq_tutel.integrations.fairseq.programs import ranks

TORCHRUN = {
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8",
}  # fmt: skip


@pytest.fixture
def cfg():
    config = make_config()
    config.distributed_training.distributed_world_size = 1
    return config


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


@pytest.mark.parametrize("env, method", [
    ({}, None), ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None), (TORCHRUN, "tcp://else:1"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
])  # fmt: skip
def test_a_process_alone_stays_alone_and_an_init_method_wins(cfg, env, method):
    cfg.distributed_training.distributed_init_method = method
    before = dict(cfg.distributed_training)
    ranks.join_started_ranks(cfg, env)
    assert dict(cfg.distributed_training) == before


def test_a_rank_whose_others_have_died_ends_in_time(programs, port):
    """As where processes were started by hand, and one found no data."""
    words = f"""
        fairseq-train --task dummy_lm --cpu --no-save --optimizer adam --user-dir fairseq_tutel
        --arch transformer_lm_gpt_moe --distributed-world-size 2 --distributed-no-spawn
        --distributed-backend gloo --distributed-init-method tcp://127.0.0.1:{port}
    """
    for rank in ("0", "1"):
        command = [*words.split(), "--distributed-rank", rank]
        done = programs.run(command, FAIRSEQ_TUTEL_START_TIMEOUT="1")
        assert done.status == 1
        assert f"error (rank {rank}): the other ranks have not connected within 1 s" in done.stderr


START = "-m fairseq_tutel.launch -- fairseq-train DATA --lr 'a b'"


@pytest.mark.parametrize("env, size, message", [
    (TORCHRUN, 3, "--distributed-world-size 3, but torchrun started 2"),
    (SRUN, 1, f"the 4 processes of srun as .*: srun \\[its options\\] python {START}$"),
    (MPIRUN, 1, f"the 3 processes of mpirun as .*: mpirun \\[its options\\] python {START}$"),
    (SRUN, 4, None),  # fairseq itself knows SLURM's variables where it sees several devices
    ({}, 2, "there are 0; to start the ranks: python -m fairseq_tutel.launch --nproc-per-node 2 -- "
     "fairseq-train DATA --lr 'a b'$"),
])  # fmt: skip
def test_what_cannot_be_one_job_is_refused_with_the_command_that_works(
    env, size, message, monkeypatch, cfg
):
    monkeypatch.setattr(ranks.sys, "argv", ["/bin/fairseq-train", "DATA", "--lr", "a b"])
    cfg.distributed_training.distributed_world_size = size
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        ranks.join_started_ranks(cfg, env)


def _dense_weights():
    """After an update of two batches, one on each of two ranks."""
    found = []
    for words, moe in (("--alternate-decoder-ffn-embed-dim 24", True), ("", False)):
        cfg = make_config(*words.split(), "--ddp-backend=pytorch_ddp", moe=moe)
        cfg.criterion = {"_name": "cross_entropy", "sentence_avg": False}
        trainer = make_trainer(cfg)
        trainer.train_step(own_batches(1, 2))
        found.append(named(trainer))
    return found


def test_dense_models_train_on_ranks_of_a_cpu():
    (one,) = run_ranks(_dense_weights, 1)
    for rank in run_ranks(_dense_weights, 2):
        for mine, theirs in zip(rank, one, strict=True):
            for name, weight in theirs.items():
                torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)


def test_a_trainer_that_would_be_one_of_two_is_refused(monkeypatch):
    """The last line of defence: Hydra's programs import the user dir too late to join."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks.sys, "argv", ["/bin/fairseq-hydra-train", "task.data=d"])
    works = "torchrun \\[its options\\] -m fairseq_tutel.launch -- fairseq-hydra-train task.data=d$"
    with pytest.raises(ValueError, match=works):
        make_trainer(make_config())
    make_trainer(make_config(moe=False))  # a dense model does what it always did
