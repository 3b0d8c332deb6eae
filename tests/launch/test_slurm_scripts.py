"""The batch scripts, with stand-ins for srun, scontrol, sbatch (the real ones: test_cluster.sh)."""

import os
import subprocess
import sys

import pytest
from helpers.programs import ROOT as REPOSITORY
from launch_helpers import executable, variables

from fairseq_tutel.command_line import EXIT_REQUEUE

SCRIPTS = REPOSITORY / "scripts" / "slurm"
OUTSIDE = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}


@pytest.fixture
def slurm(tmp_path):
    """Environment of a batch script of job 17 on 2 nodes; calls go to the file named after them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    # srun's exit code is in the file `code`. With the file `hold` it is a rank whose number the
    # launcher has noted: it waits for SIGUSR1, and perhaps has the batch script get it.
    srun = (
        "if [ -e $T/hold ]; then\n"
        'trap "echo usr1 >> $T/signals; exit 85" USR1\n'
        "mkdir $FAIRSEQ_TUTEL_FOLDER/pids; touch $FAIRSEQ_TUTEL_FOLDER/pids/$$\n"
        "[ ! -e $FAIRSEQ_TUTEL_FOLDER/requested ] || kill -USR1 $$\n"
        "[ $(cat $T/hold) = late ] && kill -USR1 $PPID\n"
        "while :; do sleep 0.02; done; fi\nexit $(cat $T/code)"
    )
    for name, action in (("srun", srun), ("scontrol", "exit 0"), ("sbatch", "exit 0")):
        notes = f'T={tmp_path}\nprintf "%s\\n" "$@" > $T/{name}.words'
        executable(tools / name, f"#!/bin/bash\n{notes}\n{action}\n")
    (tmp_path / "code").write_text("0")
    job = variables(
        "SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=n[1-2] SLURM_CPUS_ON_NODE=96 "
        f"SLURM_JOB_NAME=trial SLURM_SUBMIT_DIR={REPOSITORY}"
    )
    path = f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return {**OUTSIDE, "PATH": path, **job}


def run(script, *words, env):
    command = ["bash", str(SCRIPTS / script), *words]
    how = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, env=env, **how)


def words_of(tmp_path, name):
    path = tmp_path / f"{name}.words"
    return path.read_text().splitlines() if path.exists() else None


def command_of(tmp_path):
    words = words_of(tmp_path, "srun")
    return words[words.index("--") + 1 :]


@pytest.mark.parametrize("code", [0, 3])
def test_train_passes_the_exit_code_through(tmp_path, slurm, code):
    (tmp_path / "code").write_text(str(code))
    assert run("train.sbatch", "fairseq-train", "d", env=slurm).returncode == code
    assert words_of(tmp_path, "scontrol") is None
    words = words_of(tmp_path, "srun")
    assert words[words.index("-m") + 1] == "fairseq_tutel.launch"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=96"} <= set(words)
    assert command_of(tmp_path) == ["fairseq-train", "d"]


def test_train_requeues_on_code_85_and_gives_up_in_the_end(tmp_path, slurm):
    assert f"EXIT_REQUEUE={EXIT_REQUEUE} " in (SCRIPTS / "train.sbatch").read_text()
    (tmp_path / "code").write_text("85")
    result = run("train.sbatch", "fairseq-train", "d", env=slurm)
    assert result.returncode == 0, result.stderr
    assert words_of(tmp_path, "scontrol") == ["requeue", "17"]
    (tmp_path / "scontrol.words").unlink()
    env = {**slurm, "SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}
    result = run("train.sbatch", "fairseq-train", "d", env=env)
    assert result.returncode == 85 and "not queued again" in result.stderr
    assert words_of(tmp_path, "scontrol") is None


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_signal_is_passed_on_and_leads_to_a_requeue(tmp_path, slurm, when):
    """Also one that comes before there are ranks."""
    (tmp_path / "hold").write_text(when)
    (tmp_path / "setup.sh").write_text("kill -USR1 $$\n" if when == "early" else "")
    env = {**slurm, "ENV_SETUP": str(tmp_path / "setup.sh"), "TMPDIR": str(tmp_path)}
    done = run("train.sbatch", "fairseq-train", env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "signals").read_text() == "usr1\n"
    assert words_of(tmp_path, "scontrol") == ["requeue", "17"]
    assert not list(tmp_path.glob("tmp.*"))


ARGPARSE = ["fairseq-train", "d", "--save-dir", "{save}", "--restore-file", "old.pt",
            "--reset-optimizer", "--reset-dataloader", "--lr", "1"]  # fmt: skip
HYDRA = ["fairseq-hydra-train", "checkpoint.save_dir={save}", "checkpoint.restore_file=old.pt",
         "checkpoint.reset_optimizer=true", "task.data=d"]  # fmt: skip
PLUS = ["fairseq-hydra-train", "+checkpoint.save_dir={save}", "+checkpoint.restore_file=old.pt",
        "++checkpoint.reset_meters=true", "task.data=d"]  # fmt: skip
FILE = ["fairseq-hydra-train", "--config-dir", "{root}", "+checkpoint.finetune_from_model=old.pt",
        "task.data=d", "--config-name", "own"]  # fmt: skip
OWN = """\
base: {root}
checkpoint:
  # why
  save_dir: ${{base}}/checkpoints
  restore_file: "elsewhere.pt"
"""


@pytest.mark.parametrize(
    "given, kept",
    [
        (ARGPARSE, ["fairseq-train", "d", "--save-dir", "{save}", "--lr", "1"]),
        (HYDRA, [HYDRA[0], HYDRA[1], HYDRA[4]]),
        (PLUS, [PLUS[0], PLUS[1], PLUS[4]]),
        (FILE, [*FILE[:3], "task.data=d", "checkpoint.restore_file=checkpoint_last.pt", *FILE[5:]]),
    ],
    ids=["argparse", "hydra", "plus", "file"],
)
def test_a_restart_continues_from_the_last_checkpoint(tmp_path, slurm, given, kept):
    save = tmp_path / "checkpoints"
    (tmp_path / "own.yaml").write_text(OWN.format(root=tmp_path))
    given, kept = (
        [word.format(save=save, root=tmp_path) for word in words] for words in (given, kept)
    )
    restarted = {**slurm, "SLURM_RESTART_COUNT": "1"}
    # nothing saved yet: the restart begins as the first run did
    assert run("train.sbatch", *given, env=restarted).returncode == 0
    assert command_of(tmp_path) == given
    save.mkdir()
    for name in ("checkpoint_last.pt", "checkpoint_last-shared.pt"):
        (save / name).touch()
        for env, words in ((slurm, given), (restarted, kept)):
            assert run("train.sbatch", *given, env=env).returncode == 0
            assert command_of(tmp_path) == words
        (save / name).unlink()


def test_a_restart_stops_where_its_start_cannot_be_determined(tmp_path, slurm):
    (tmp_path / "own.yaml").write_text("checkpoint:\n  save_dir: ${composed.elsewhere}\n")
    words = ["fairseq-hydra-train", "--config-dir", str(tmp_path), "--config-name", "own"]
    result = run("train.sbatch", *words, env={**slurm, "SLURM_RESTART_COUNT": "1"})
    assert result.returncode == 2 and "composed" in result.stderr
    assert words_of(tmp_path, "srun") is None


def test_train_without_a_command(tmp_path, slurm):
    env = {**slurm, "CONFIG": "tiny", "OVERRIDES": "a=1 b=2", "NPROC_PER_NODE": "2"}
    assert run("train.sbatch", env=env).returncode == 0
    assert " ".join(command_of(tmp_path)) == (
        "fairseq-hydra-train --config-dir configs --config-name tiny "
        "checkpoint.save_dir=checkpoints/trial-17 a=1 b=2"
    )
    words = words_of(tmp_path, "srun")
    assert words[words.index("--nproc-per-node") + 1] == "2"
    env.update(SLURM_ARRAY_JOB_ID="15", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="1")
    assert run("train.sbatch", env=env).returncode == 0
    assert "checkpoint.save_dir=checkpoints/trial-15_3" in command_of(tmp_path)


def test_outside_a_checkout(tmp_path, slurm):
    result = run("train.sbatch", "true", env={**slurm, "REPO": str(tmp_path)})
    assert result.returncode == 2
    (tmp_path / "scripts" / "slurm").mkdir(parents=True)
    (tmp_path / "scripts" / "slurm" / "common.sh").symlink_to(SCRIPTS / "common.sh")
    result = run("train.sbatch", "true", env={**slurm, "REPO": str(tmp_path)})
    assert result.returncode == 2 and "no checkout of fairseq_tutel" in result.stderr


def test_an_unknown_benchmark_is_refused(slurm):
    result = run("bench.sbatch", "generate-all", env=slurm)
    assert result.returncode == 2 and "give layer, alltoall or train" in result.stderr


@pytest.mark.parametrize("script", ["train.sbatch", "bench.sbatch"])
def test_help(script):
    result = run(script, "--help", env=OUTSIDE)
    assert result.returncode == 0
    assert f"scripts/slurm/{script}" in result.stdout and "NPROC_PER_NODE" in result.stdout
    assert "#SBATCH" not in result.stdout and "#!" not in result.stdout
    result = run(script, env=OUTSIDE)
    assert result.returncode == 2 and "not in a SLURM job" in result.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (["--gpus", "12"], "12 GPUs do not fill nodes of 8"),
        (["--gpus", "x"], "x is not a positive"),
        (["--jobs", "eval"], "eval is none of"),
        (["--partition", "p"], "unknown option --partition"),
        (["--gpus"], "--gpus needs a value"),
    ],
)
def test_ladder_refuses(slurm, options, message):
    result = run("submit_ladder.sh", *options, env=slurm)
    assert result.returncode == 2 and message in result.stderr
