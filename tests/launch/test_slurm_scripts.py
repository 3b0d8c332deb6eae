"""The batch scripts, with stand-ins for srun, scontrol, sbatch (the real ones: test_cluster.sh)."""

import os
import subprocess
import sys

import pytest
from helpers.commands import ROOT, executable, variables

from fairseq_tutel.command_line import EXIT_REQUEUE

SCRIPTS = ROOT / "scripts" / "slurm"
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
    script, *words = line.split()
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(["bash", str(SCRIPTS / script), *words], env=env, **how)


@pytest.fixture
def called(tmp_path):
    """Runs a script in job 17 on 2 nodes; returns its end, and the words of calls by program."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "sbatch"):
        executable(tmp_path / "bin" / name, TOOL)
    job = variables(
        "SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=n[1-2] SLURM_CPUS_ON_NODE=96 "
        f"SLURM_JOB_NAME=trial SLURM_SUBMIT_DIR={ROOT} NOTES={tmp_path} TMPDIR={tmp_path}"
    )
    path = f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

    def call(line, env=""):
        env = variables(env.format(tmp=tmp_path))
        done = run(line.format(tmp=tmp_path), {**OUTSIDE, "PATH": path, **job, **env})
        return done, {note.stem: note.read_text().splitlines() for note in tmp_path.glob("*.words")}

    return call


TRAIN, RUN, C = "train.sbatch fairseq-train d", "fairseq-hydra-train", "checkpoint."
TINY = f"{RUN} --config-dir configs --config-name tiny {C}save_dir=checkpoints/trial-"


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
        ("train.sbatch", "CONFIG=tiny OVERRIDES=a=1~b=2 NPROC_PER_NODE=2", 0, f"{TINY}17 a=1 b=2"),
        ("train.sbatch", "CONFIG=tiny SLURM_ARRAY_JOB_ID=15 SLURM_ARRAY_TASK_ID=3 "
         "SLURM_RESTART_COUNT=1", 0, f"{TINY}15_3"),
        ("train.sbatch true", "REPO={tmp}", 2, "No such file"),
        ("train.sbatch true", "REPO={tmp}/elsewhere", 2, "no checkout of fairseq_tutel"),
        (f"train.sbatch {RUN} --config-dir {{tmp}} --config-name composed",
         "SLURM_RESTART_COUNT=1", 2, "composed.elsewhere"),
        ("bench.sbatch generate-all", "", 2, "give layer, alltoall or train"),
        ("submit_ladder.sh --gpus 12", "", 2, "12 GPUs do not fill nodes of 8"),
        ("submit_ladder.sh --partition p", "", 2, "unknown option --partition"),
    ],
)  # fmt: skip
def test_what_a_script_calls_and_says(tmp_path, called, line, env, code, said):
    (tmp_path / "composed.yaml").write_text("checkpoint:\n  save_dir: ${composed.elsewhere}\n")
    (tmp_path / "early.sh").write_text("kill -USR1 $$\n")
    (tmp_path / "elsewhere/scripts/slurm").mkdir(parents=True)
    (tmp_path / "elsewhere/scripts/slurm/common.sh").symlink_to(SCRIPTS / "common.sh")
    done, calls = called(line, env)
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


OWN = 'base: {}\ncheckpoint:\n  # why\n  save_dir: ${{base}}/save\n  restore_file: "elsewhere.pt"\n'
TRAINS, SAVE = "fairseq-train d --save-dir {tmp}/save", f"{C}save_dir={{tmp}}/save"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"{TRAINS} --restore-file old.pt --reset-optimizer --reset-dataloader --lr 1",
         f"{TRAINS} --lr 1"),
        (f"{RUN} {SAVE} {C}restore_file=old.pt {C}reset_optimizer=true a=d", f"{RUN} {SAVE} a=d"),
        (f"{RUN} +{SAVE} +{C}restore_file=old.pt ++{C}reset_meters=true a=d", f"{RUN} +{SAVE} a=d"),
        (f"{RUN} --config-dir {{tmp}} +{C}finetune_from_model=old.pt a=d --config-name own",
         f"{RUN} --config-dir {{tmp}} a=d {C}restore_file=checkpoint_last.pt --config-name own"),
    ],
)  # fmt: skip
def test_a_restart_continues_from_the_last_checkpoint(tmp_path, called, given, kept):
    again, save = "SLURM_RESTART_COUNT=1", tmp_path / "save"
    (tmp_path / "own.yaml").write_text(OWN.format(tmp_path))
    save.mkdir()
    cases = [("nothing.pt", again, given)]  # nothing saved yet: it begins as the first run did
    for name in ("checkpoint_last.pt", "checkpoint_last-shared.pt"):
        cases += [(name, "", given), (name, again, kept)]
    for name, env, wanted in cases:
        (save / name).touch()
        done, calls = called(f"train.sbatch {given}", env)
        (save / name).unlink()
        words = " ".join(calls["srun"]).partition(" -- ")[2]
        assert done.returncode == 0 and words == wanted.format(tmp=tmp_path)


def test_help_and_no_job():
    for script in ("train.sbatch", "bench.sbatch"):
        outside, shown = run(script, OUTSIDE), run(f"{script} --help", OUTSIDE)
        assert outside.returncode == 2 and "not in a SLURM job" in outside.stderr
        assert shown.returncode == 0 and f"scripts/slurm/{script}" in shown.stdout
        assert "NPROC_PER_NODE" in shown.stdout and "#SBATCH" not in shown.stdout
