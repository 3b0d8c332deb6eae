"""An error in a command is one line that names what is wrong and what to do.

Standard error has no other line, beside log lines up to INFO and Hydra's own "Error executing job
with overrides: ..."; warnings are not looked at, and fairseq logs to standard output.
"""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from commands import BIN
from helpers.commands import ROOT, SMALL_LM, environment
from helpers.programs import Outcome

DATA = "tests/golden/data_world1"
SET = "tests/golden/top2_world1/final/checkpoint_last.pt"
MOE = f"{SMALL_LM} --moe-expert-count 4 --lr 0.002 --max-update 1"
LM = "--task language_modeling --tokens-per-sample 8 --sample-break-mode none"
TRAIN = f"fairseq-train {DATA} {MOE} {LM} --no-save --batch-size 3"
EVAL = "--user-dir fairseq_tutel --task language_modeling --cpu"
SCORE = f"fairseq-eval-lm {DATA} {EVAL} --path {SET} --batch-size 2"
HYDRA = "fairseq-hydra-train --config-dir configs --config-name tiny_cpu checkpoint.no_save=true"
LAUNCH = "-m fairseq_tutel.launch"
PLAN = "-m fairseq_tutel.plan"
CHECKPOINT = "-m fairseq_tutel.checkpoint"
PLANNED = f"{PLAN} gpus=8 -- fairseq-train {{tmp}}"

# (command line, what its line holds); {tmp} is a folder
OURS = [
    # options of the model and the criterion
    (f"{TRAIN} --moe-expert-cuont 4", "--moe-expert-cuont", "did you mean --moe-expert-count?"),
    (f"{TRAIN} --arch transformer_lm_gpt_mo", "_gpt_mo'", "did you mean transformer_lm_gpt_moe"),
    (f"{TRAIN.replace('moe_cross_entropy', 'cross_entropy')} --moe-gate-loss-wt 0.1",
     "--moe-gate-loss-wt belongs to --criterion moe_cross_entropy"),
    (TRAIN.replace("transformer_lm_gpt_moe", "transformer_lm_gpt"),
     "--moe-expert-count belongs to --arch transformer_lm_gpt_moe or transformer_moe, the command "
     "has --arch transformer_lm_gpt"),
    (TRAIN.replace("--task language_modeling", ""), "--tokens-per-sample belongs to --task "
     "language_modeling; the task is translation, the default"),
    (TRAIN.replace("--optimizer adam", ""), "give --optimizer adam"),
    (f"fairseq-train {DATA} {MOE} --batch-size 3 --no-save",
     "--task translation is not for --arch transformer_lm_gpt_moe", "--task language_modeling"),
    (f"{HYDRA} common.fp16=true common.bf16=true", "common.fp16 and common.bf16", "give one"),
    (f"{SCORE} --model-overrides \"{{{{'moe_eval_capacty_factor': 1}}}}\"",
     "moe_eval_capacty_factor: there is no such option; did you mean moe_eval_cap"),
    (f"{SCORE} --model-overrides [1]", "--model-overrides [1]", "{{'moe_top_k': 1}}"),
    # sets
    (f"{TRAIN} --restore-file /no/x.pt", "--restore-file /no/x.pt", "/no/x.pt does not"),
    (f"fairseq-eval-lm {DATA} {EVAL}", "--path is missing"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path {SET.replace('last', 'lost')}",
     "checkpoint_lost.pt; tests/golden/top2_world1/final holds checkpoint_last.pt"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path /no/x.pt", "/no/x.pt; there is no folder /no"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path {{tmp}}", "{tmp}", "Is a directory"),
    # the launcher
    (f"{LAUNCH} --cpu fairseq-train {DATA}", "--cpu", "-- COMMAND"),
    (f"{LAUNCH} --nproc-per-node 0 -- true", "--nproc-per-node: 0 must be at least 1"),
    (f"{LAUNCH} -- fairseq-eval-lm {DATA} --path {SET}",
     f"--path {SET} has experts", "add --user-dir fairseq_tutel"),
    # the planner and the checkpoint tools
    (f"{PLAN} --config-name nosuch", "'nosuch'", "meta_1.1t"),
    (f"{PLANNED} --optimizer adam --arch transformer_lm_gpt_moe --nosuch", "--nosuch"),
    (f"{PLANNED} --arch transformer_lm_gpt_moe hardware=cpu", "put it before --, as in python -m "
     "fairseq_tutel.plan hardware=cpu -- fairseq-train"),
    (f"{PLAN} gpus=8 -- fairseq-eval-lm {{tmp}}", "fairseq-train", "fairseq-eval-lm"),
    (f"{CHECKPOINT} nosuch", "'nosuch'", "'inspect'"),
]  # fmt: skip
# where what fairseq says, or the operating system, is the user's error
FAIRSEQS = [
    (f"fairseq-train /no/data {MOE} {LM} --batch-size 3 --no-save", "/no/data/dict.txt: No such"),
    (f"{TRAIN} --train-subset nosuch", "nosuch", DATA),
    (f"{TRAIN} --log-file {{tmp}}/no/log.txt", "{tmp}/no/log.txt: No such file"),
    (TRAIN.replace(DATA, "{tmp}/bad-dictionary"), "Incorrect dictionary format", "fairseq/data/"),
    (
        f"{TRAIN} --distributed-world-size 2",
        "--distributed-world-size 2: fairseq starts a rank per GPU, of which there are 0",
    ),
    (f"{HYDRA} task._name=nosuch", "nosuch"),
]
_BESIDE = ("DEBUG:", "INFO:", "Error executing job with overrides: ")


def _words(command: str, folder) -> list[str]:
    words = shlex.split(command.format(tmp=folder))
    return words if words[0] == "-m" else [str(BIN / words[0]), *words[1:]]


def _said(outcome: Outcome) -> str:
    assert outcome.status > 0, outcome
    said = [line for line in outcome.stderr.splitlines() if not line.startswith(_BESIDE)]
    assert len(said) == 1, outcome.stderr[-3000:]
    assert re.match(r"(fairseq-[a-z-]+|launch|python -m [\w. ]+): error|error: ", said[0])
    assert len(said[0]) <= 2000  # Hydra lists all tasks
    return said[0]


@pytest.mark.parametrize("case", OURS + FAIRSEQS, ids=lambda case: str(case)[-60:])
def test_an_error_is_one_line(case, programs, tmp_path):
    """Ours: with what to do. fairseq's: where one line comes for free; others are tracebacks."""
    if "bad-dictionary" in case[0]:
        shutil.copytree(ROOT / DATA, tmp_path / "bad-dictionary")
        (tmp_path / "bad-dictionary" / "dict.txt").write_text("hello\n")
    command, *fragments = case
    said = _said(programs.run(_words(command, tmp_path), CUDA_VISIBLE_DEVICES=""))
    for fragment in fragments:
        assert fragment.format(tmp=tmp_path) in said


@pytest.mark.long
def test_a_process_of_its_own_prints_the_same(programs, tmp_path):
    """The others run forked from one that has made the imports (helpers/program_server.py)."""
    words = _words(OURS[0][0], tmp_path)
    env = environment(CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")
    how = {"cwd": ROOT, "env": env, "text": True, "capture_output": True, "timeout": 100}
    real = subprocess.run(words, **how)
    forked = programs.run(words, CUDA_VISIBLE_DEVICES="")
    assert _said(Outcome(real.returncode, real.stdout, real.stderr)) == _said(forked)


def test_a_full_disk_is_told_in_one_line_by_each_rank(programs, tmp_path):
    """As a limit on the size of files: the set of a run, on two ranks."""
    command = f"{TRAIN.replace(' --no-save', '')} --save-dir {tmp_path}/save"
    # without bytecode: Python would cut that off too, and the other rank could not read it
    limit = "import resource as r, sys; sys.dont_write_bytecode = True; "
    limit += "r.setrlimit(r.RLIMIT_FSIZE, (20_000, 20_000))"
    done = programs.run(_words(command, tmp_path), ranks=2, prelude=limit, CUDA_VISIBLE_DEVICES="")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.status > 0 and len(errors) == 2 and "Traceback" not in done.text, done.stderr
    assert all("File too large" in line and f"{tmp_path}/save/" in line for line in errors)
    assert os.listdir(tmp_path / "save") == []


@pytest.mark.parametrize("wrong", ["--moe-expert-cuont 4", "--finetune-from-model /no/x.pt"])
def test_what_all_ranks_find_is_told_once(wrong, programs, tmp_path):
    """The launcher names the folder by which its ranks know of each other."""
    folder = {"FAIRSEQ_TUTEL_LAUNCHER": str(tmp_path / "launcher"), "CUDA_VISIBLE_DEVICES": ""}
    done = programs.run(_words(f"{TRAIN} {wrong}", tmp_path), ranks=2, **folder)
    assert done.status > 0 and done.stderr.count("fairseq-train: error") == 1, done.stderr


def test_the_traceback_can_be_had(programs, tmp_path):
    words = _words(f"fairseq-eval-lm {DATA} {EVAL} --path /no/x.pt", tmp_path)
    output = programs.run(words, CUDA_VISIBLE_DEVICES="", FAIRSEQ_TUTEL_TRACEBACK="1").stderr
    assert "Traceback" in output and "load_model_ensemble_and_task" in output
