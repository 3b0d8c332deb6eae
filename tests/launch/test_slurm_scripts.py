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
# srun ends with $CODE. With $HOLD it is a rank whose number the launcher has noted: it waits for
# SIGUSR1, and perhaps has the batch script get it.
TOOL = """#!/bin/bash
printf "%s\\n" "$@" > $NOTES/${0##*/}.words
[ ${0##*/} = srun ] || exit 0
[ "$HOLD" ] || exit ${CODE:-0}
trap "echo usr1 >> $NOTES/signals; exit 85" USR1
mkdir $FAIRSEQ_TUTEL_FOLDER/pids; touch $FAIRSEQ_TUTEL_FOLDER/pids/$$
[ ! -e $FAIRSEQ_TUTEL_FOLDER/requested ] || kill -USR1 $$
[ $HOLD = late ] && kill -USR1 $PPID
while :; do sleep 0.02; done
"""


def run(line, env):
    script, *words = line.split() if isinstance(line, str) else line
    how = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(["bash", str(SCRIPTS / script), *words], env=env, **how)


@pytest.fixture
def called(tmp_path):
    """Runs a script in job 17 on 2 nodes, and returns words of its calls by their program, too."""
    for name in ("srun", "scontrol", "sbatch"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        executable(tmp_path / "bin" / name, TOOL)
    job = variables(
        "SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=n[1-2] SLURM_CPUS_ON_NODE=96 "
        f"SLURM_JOB_NAME=trial SLURM_SUBMIT_DIR={REPOSITORY} NOTES={tmp_path} TMPDIR={tmp_path}"
    )
    path = f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

    def call(line, env=""):
        for note in tmp_path.glob("*.words"):
            note.unlink()
        done = run(line, {**OUTSIDE, "PATH": path, **job, **variables(env)})
        return done, {note.stem: note.read_text().splitlines() for note in tmp_path.glob("*.words")}

    return call


TRAIN, NO_COMMAND = "train.sbatch fairseq-train d", "train.sbatch"
TINY = "fairseq-hydra-train --config-dir configs --config-name tiny checkpoint.save_dir=checkpoints"


@pytest.mark.parametrize(
    ("line", "env", "code", "said"),
    [
        (TRAIN, "", 0, "fairseq-train d"),
        (TRAIN, "CODE=3", 3, "fairseq-train d"),
        (TRAIN, "CODE=85", 0, "fairseq-train d"),  # and is queued again
        (TRAIN, "CODE=85 SLURM_RESTART_COUNT=3 MAX_REQUEUES=3", 85, "not queued again"),
        # also a signal that comes before there are ranks
        (TRAIN, "HOLD=early ENV_SETUP={tmp}/early.sh", 0, "fairseq-train d"),
        (TRAIN, "HOLD=late", 0, "fairseq-train d"),
        (NO_COMMAND, "CONFIG=tiny OVERRIDES=a=1~b=2 NPROC_PER_NODE=2", 0,
         f"{TINY}/trial-17 a=1 b=2"),
        (NO_COMMAND, "CONFIG=tiny SLURM_ARRAY_JOB_ID=15 SLURM_ARRAY_TASK_ID=3 "
         "SLURM_RESTART_COUNT=1", 0, f"{TINY}/trial-15_3"),
        ("train.sbatch true", "REPO={tmp}", 2, "No such file"),
        ("train.sbatch true", "REPO={tmp}/elsewhere", 2, "no checkout of fairseq_tutel"),
        ("train.sbatch fairseq-hydra-train --config-dir {tmp} --config-name composed",
         "SLURM_RESTART_COUNT=1", 2, "composed.elsewhere"),
        ("bench.sbatch generate-all", "", 2, "give layer, alltoall or train"),
        ("submit_ladder.sh --gpus 12", "", 2, "12 GPUs do not fill nodes of 8"),
        ("submit_ladder.sh --gpus x", "", 2, "x is not a positive"),
        ("submit_ladder.sh --jobs eval", "", 2, "eval is none of"),
        ("submit_ladder.sh --partition p", "", 2, "unknown option --partition"),
        ("submit_ladder.sh --gpus", "", 2, "--gpus needs a value"),
    ],
)  # fmt: skip
def test_what_a_script_calls_and_says(tmp_path, called, line, env, code, said):
    (tmp_path / "composed.yaml").write_text("checkpoint:\n  save_dir: ${composed.elsewhere}\n")
    (tmp_path / "early.sh").write_text("kill -USR1 $$\n")
    (tmp_path / "elsewhere/scripts/slurm").mkdir(parents=True)
    (tmp_path / "elsewhere/scripts/slurm/common.sh").symlink_to(SCRIPTS / "common.sh")
    done, calls = called(line.format(tmp=tmp_path), env.format(tmp=tmp_path))
    assert done.returncode == code, done.stderr
    again = code == 0 and ("CODE=85" in env or "HOLD" in env)
    assert calls.get("scontrol") == (["requeue", "17"] if again else None)
    assert not list(tmp_path.glob("tmp.*"))
    assert (tmp_path / "signals").exists() == ("HOLD" in env)
    if code == 2 or "not queued" in said:
        assert said in done.stderr and (code == 85 or "srun" not in calls)
        return
    words = calls["srun"]
    assert words[words.index("-m") + 1] == "fairseq_tutel.launch"
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=96"} <= set(words)
    launched, command = words[: words.index("--")], words[words.index("--") + 1 :]
    assert launched[-2:] == ["--nproc-per-node", "2" if "NPROC" in env else "auto"]
    assert " ".join(command) == said
    assert f"EXIT_REQUEUE={EXIT_REQUEUE} " in (SCRIPTS / "train.sbatch").read_text()


OWN = """\
base: {root}
checkpoint:
  # why
  save_dir: ${{base}}/checkpoints
  restore_file: "elsewhere.pt"
"""
TRAINS, HYDRA, C = "fairseq-train d --save-dir {save}", "fairseq-hydra-train", "checkpoint."


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"{TRAINS} --restore-file old.pt --reset-optimizer --reset-dataloader --lr 1",
         f"{TRAINS} --lr 1"),
        (f"{HYDRA} {C}save_dir={{save}} {C}restore_file=old.pt {C}reset_optimizer=true a=d",
         f"{HYDRA} {C}save_dir={{save}} a=d"),
        (f"{HYDRA} +{C}save_dir={{save}} +{C}restore_file=old.pt ++{C}reset_meters=true a=d",
         f"{HYDRA} +{C}save_dir={{save}} a=d"),
        (f"{HYDRA} --config-dir {{root}} +{C}finetune_from_model=old.pt a=d --config-name own",
         f"{HYDRA} --config-dir {{root}} a=d {C}restore_file=checkpoint_last.pt --config-name own"),
    ],
)  # fmt: skip
def test_a_restart_continues_from_the_last_checkpoint(tmp_path, called, given, kept):
    save, again = tmp_path / "checkpoints", "SLURM_RESTART_COUNT=1"
    (tmp_path / "own.yaml").write_text(OWN.format(root=tmp_path))
    given, kept = (words.format(save=save, root=tmp_path) for words in (given, kept))
    save.mkdir()
    cases = [("nothing.pt", again, given)]  # nothing saved yet: it begins as the first run did
    for name in ("checkpoint_last.pt", "checkpoint_last-shared.pt"):
        cases += [(name, "", given), (name, again, kept)]
    for name, env, wanted in cases:
        (save / name).touch()
        done, calls = called(f"train.sbatch {given}", env)
        (save / name).unlink()
        words = calls["srun"]
        assert done.returncode == 0 and " ".join(words[words.index("--") + 1 :]) == wanted


@pytest.mark.parametrize("script", ["train.sbatch", "bench.sbatch"])
def test_help(script):
    result = run(f"{script} --help", OUTSIDE)
    assert result.returncode == 0
    assert f"scripts/slurm/{script}" in result.stdout and "NPROC_PER_NODE" in result.stdout
    assert "#SBATCH" not in result.stdout and "#!" not in result.stdout
    result = run(script, OUTSIDE)
    assert result.returncode == 2 and "not in a SLURM job" in result.stderr
