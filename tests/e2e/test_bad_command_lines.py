"""An error in a command is one line that names what is wrong and what to do.

Exactly: the exit code is positive, and standard error is one line (beside log lines up to INFO and
Hydra's own "Error executing job with overrides: ..."; warnings are not looked at, and fairseq
logs to standard output): no traceback, no usage. The line begins with the program's name or
``error:``, holds the fragments that stand beside the command below (the offending value, and what
helps), and is at most 600 characters long.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from commands import BIN, ROOT, environment
from helpers.programs import Outcome

DATA = "tests/golden/data_world1"
SET = "tests/golden/top2_world1/final/checkpoint_last.pt"
_SIZE = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32"
_MODEL = f"--user-dir fairseq_tutel {_SIZE} --decoder-attention-heads 2 --arch"
_RUN = (
    "--optimizer adam --lr 0.002 --max-update 1 --num-workers 0 --required-batch-size-multiple 1"
    " --cpu"
)
MOE = f"{_MODEL} transformer_lm_gpt_moe {_RUN} --criterion moe_cross_entropy --moe-expert-count 4"
LM = "--task language_modeling --tokens-per-sample 8 --sample-break-mode none"
TRAIN = f"fairseq-train {DATA} {MOE} {LM} --no-save --batch-size 3"
EVAL = "--user-dir fairseq_tutel --task language_modeling --cpu"
SCORE = f"fairseq-eval-lm {DATA} {EVAL} --path {SET} --batch-size 2"
RESETS = "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler"
HYDRA = "fairseq-hydra-train --config-dir configs --config-name tiny_cpu checkpoint.no_save=true"
LAUNCH = "-m fairseq_tutel.launch"
PLAN = "-m fairseq_tutel.plan"
CHECKPOINT = "-m fairseq_tutel.checkpoint"

# (command line, what its last line holds); {tmp} is an empty folder with a file `file`
CASES = [
    # what is missing
    (f"fairseq-train {DATA} {MOE} --batch-size 3 --no-save", "no --task", "language_modeling"),
    (f"fairseq-train {DATA} {MOE} --tokens-per-sample 8", "--tokens-per-sample", "no --task"),
    (f"fairseq-train {DATA} --user-dir fairseq_tutel {LM}", "--arch is missing", "gpt_moe"),
    (f"fairseq-train {MOE} {LM} --batch-size 3", "required: data"),
    (TRAIN.replace("--batch-size 3", ""), "--batch-size or --max-tokens"),
    (f"{TRAIN} --batch-size", "--batch-size", "expected one argument"),
    (f"fairseq-eval-lm {DATA} {EVAL}", "--path is missing"),
    (f"fairseq-generate {DATA} {EVAL}", "--path is missing"),
    (f"fairseq-generate {DATA} --user-dir fairseq_tutel --path {SET}", "no --task", "translation"),
    (f"fairseq-validate {DATA} --user-dir fairseq_tutel --path {SET}", "--task is missing"),
    (f"fairseq-validate {DATA} {EVAL} --path {SET}", "--batch-size or --max-tokens"),
    # files and folders
    (f"fairseq-train /no/data {MOE} {LM} --batch-size 3 --no-save", "/no/data", "preprocess"),
    (f"fairseq-train {{tmp}} {MOE} {LM} --batch-size 3 --no-save", "{tmp} has no dict.txt"),
    (f"{TRAIN} --train-subset nosuch", "'nosuch'", DATA, "train, valid", "--train-subset"),
    (f"{TRAIN} --valid-subset nosuch", "'nosuch'", "train, valid", "--valid-subset"),
    (f"{TRAIN} --save-dir {{tmp}}/file/save", "--save-dir {tmp}/file/save", "choose another"),
    (f"{TRAIN} --finetune-from-model /no/x.pt", "--finetune-from-model /no/x.pt", "checkpoint"),
    (f"{TRAIN} --restore-file /no/x.pt", "--restore-file /no/x.pt", "/no/x-shared.pt"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path /no/x.pt", "--path /no/x.pt", "/no/x-shared.pt"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path {{tmp}}", "{tmp}", "Is a directory"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path README.md", "README.md", "is not a checkpoint"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path {SET} --gen-subset no", "'no'", "train, valid"),
    (f"fairseq-generate {DATA} {EVAL} --path /no/x.pt", "--path /no/x.pt"),
    (f"fairseq-interactive {DATA} {EVAL} --path /no/x.pt", "--path /no/x.pt"),
    (f"fairseq-interactive /no/data {EVAL} --path {SET}", "/no/data", "preprocess"),
    (f"{SCORE.replace('eval-lm', 'generate')} --gen-subset valid", "512 tokens", "8 positions"),
    (f"{TRAIN} --tensorboard-logdir {{tmp}}/file/tb", "--tensorboard-logdir {tmp}/file/tb: "),
    (f"{TRAIN} --log-file {{tmp}}/no/log.txt", "--log-file {tmp}/no/log.txt: No such file"),
    (
        f"{SCORE.replace('eval-lm', 'generate')} --gen-subset valid --tokens-per-sample 8"
        " --results-path {tmp}/file/out",
        "--results-path {tmp}/file/out: ",
    ),
    (TRAIN.replace(DATA, "{tmp}/bad-dictionary"), "dict.txt is no dictionary", "'hello'"),
    (TRAIN.replace(DATA, "{tmp}/short-dictionary"), "beyond the model's 6 embeddings", "dict.txt"),
    (TRAIN.replace(DATA, "{tmp}/cut-data"), "{tmp}/cut-data/train.bin is damaged", "preprocess"),
    (
        f"{TRAIN} --restore-file {SET} {RESETS}",
        "does not fit this model; check that the architectures match",
        "decoder.embed_tokens.weight is [256, 32] in the checkpoint, [256, 16] in the model; and",
    ),
    # names
    (f"{TRAIN} --moe-expert-cuont 4", "--moe-expert-cuont", "did you mean --moe-expert-count?"),
    (f"{TRAIN} --arch transformer_lm_gpt_mo", "_gpt_mo'", "did you mean transformer_lm_gpt_moe"),
    (f"{TRAIN} --criterion moe_cross", "'moe_cross'", "did you mean moe_cross_entropy?"),
    (f"{TRAIN} --task language_modelling", "'language_modelling'", "language_modeling"),
    (f"{TRAIN} --optimizer adma", "--optimizer", "'adma'", "'adam'"),
    (f"{TRAIN} --ddp-backend nosuch", "--ddp-backend", "'nosuch'", "legacy_ddp"),
    (f"{TRAIN} --best-checkpoint-metric nosuch", "--best-checkpoint-metric nosuch", "loss"),
    # whose options they are
    (
        f"{TRAIN.replace('moe_cross_entropy', 'cross_entropy')} --moe-gate-loss-wt 0.1",
        "--moe-gate-loss-wt belongs to --criterion moe_cross_entropy",
        "the command has --criterion cross_entropy",
    ),
    (
        TRAIN.replace("transformer_lm_gpt_moe", "transformer_lm_gpt"),
        "--moe-expert-count belongs to --arch transformer_lm_gpt_moe",
    ),
    # values
    (f"{TRAIN} --fp16 --bf16", "--fp16 and --bf16", "give one"),
    (f"{TRAIN} --seed -1", "--seed -1 must be at least 0"),
    (f"{TRAIN} --adam-eps 0", "--adam-eps 0.0 must be above 0"),
    (f"{TRAIN} --lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates 0", "inverse"),
    (f"{SCORE} --softmax-batch -1", "--softmax-batch -1 must be at least 0"),
    (f"{SCORE.replace('eval-lm', 'validate')} --log-interval 0", "--log-interval 0 must be"),
    (f"{SCORE.replace('eval-lm', 'generate')} --beam 0", "--beam 0 must be at least 1"),
    (f"{SCORE.replace('eval-lm', 'interactive')} --nbest -1", "--nbest -1 must be at least 1"),
    (f"{TRAIN} --lr x", "--lr", "'x'"),
    (f"{TRAIN} --max-update x", "--max-update", "'x'"),
    (f"{TRAIN} --moe-top-k 9", "top_k=9", "between 1 and the number of experts, 4"),
    (f"{TRAIN} --decoder-attention-heads 3", "16 is not a multiple", "--decoder-attention-heads 3"),
    (f"{TRAIN} --adam-betas nonsense", "--adam-betas nonsense"),
    (f"{TRAIN} --max-tokens 4", "--max-tokens 4", "every sample is longer"),
    (f"{TRAIN} --amp", "--amp is not supported"),
    (f"{TRAIN} --distributed-world-size 2", "--distributed-world-size 2", "fairseq_tutel.launch"),
    (f"fairseq-eval-lm {DATA} {EVAL} --path {SET} --model-overrides x", "--model-overrides x"),
    (
        f"fairseq-interactive {DATA} {EVAL} --path {SET} --buffer-size 1 --batch-size 5",
        "--batch-size 5 is larger than --buffer-size 1",
    ),
    # Hydra, once it has read the config
    (f"{HYDRA} common.fp16=true common.bf16=true", "common.fp16 and common.bf16", "give one"),
    (f"{HYDRA} checkpoint.finetune_from_model=/no/x.pt", "/no/x.pt", "checkpoint"),
    (f"{HYDRA} task._name=nosuch", "task._name=nosuch", "language_modeling"),
    (f"{HYDRA} model._name=nosuch", "model._name=nosuch", "transformer_lm_gpt_moe"),
    (f"{HYDRA} criterion._name=nosuch", "criterion._name=nosuch", "moe_cross_entropy"),
    # the launcher
    (f"{LAUNCH} --bind sideways -- true", "--bind sideways", "auto nor none"),
    (f"{LAUNCH} --nproc-per-node x -- true", "--nproc-per-node", "'x'", "auto"),
    (f"{LAUNCH} --nproc-per-node 2", "no command given", "-- fairseq-train"),
    (f"{LAUNCH} --cpu fairseq-train {DATA}", "--cpu", "-- COMMAND"),
    (f"{LAUNCH} -- nosuchprogram", "'nosuchprogram'", "PATH"),
    (f"{LAUNCH} --output nosuch -- true", "--output", "'nosuch'", "'plain'"),
    (f"{LAUNCH} --nproc-per-node 3 -- {TRAIN}", "--moe-expert-count=4", "world size of 3"),
    (
        f"{LAUNCH} -- fairseq-hydra-train --config-dir configs --config-name nosuch",
        "--config-name nosuch",
        "tiny_cpu",
    ),
    (f"{LAUNCH} -- fairseq-hydra-train --config-name nosuch", "--config-name nosuch", "tiny_cpu"),
    (f"{LAUNCH} -- {HYDRA.replace('dir configs', 'dir /no')}", "--config-dir /no"),
    # the planner and the checkpoint tools
    (f"{PLAN}", "--config-name"),
    (f"{PLAN} --config-name nosuch", "'nosuch'", "meta_1.1t"),
    (f"{PLAN} --config-name meta_1.1t gpus=x", "gpus=x", "positive number"),
    (f"{PLAN} --config-name meta_1.1t --nosuch", "--nosuch", "--help"),
    (f"{PLAN} --config-name meta_1.1t --figure {{tmp}}/file/x.png", "{tmp}/file"),
    (f"{CHECKPOINT}", "COMMAND"),
    (f"{CHECKPOINT} nosuch", "'nosuch'", "'inspect'"),
    (f"{CHECKPOINT} inspect /no/x.pt", "/no/x.pt", "x-shared.pt"),
    (f"{CHECKPOINT} reshard {SET} {{tmp}}/out.pt --ranks 3", "4 experts", "3 ranks", "divide"),
    (f"{CHECKPOINT} merge {SET} {SET}", SET, "source itself"),
]
_BESIDE = ("DEBUG:", "INFO:", "Error executing job with overrides: ")


def _damaged_copies(folder) -> None:
    """Of the data, each with one file that is wrong."""
    data = (ROOT / DATA / "train.bin").read_bytes()
    for name, file, content in (
        ("bad-dictionary", "dict.txt", b"hello\n"),
        ("short-dictionary", "dict.txt", b"a 1\nb 1\n"),
        ("cut-data", "train.bin", data[: len(data) // 2]),
    ):
        shutil.copytree(ROOT / DATA, folder / name)
        (folder / name / file).write_bytes(content)


def _words(command: str, folder) -> list[str]:
    words = shlex.split(command.format(tmp=folder))
    return words if words[0] == "-m" else [str(BIN / words[0]), *words[1:]]


def _said(outcome: Outcome) -> str:
    """The one line; fails where there is none or more."""
    assert outcome.status > 0, outcome
    said = [line for line in outcome.stderr.splitlines() if not line.startswith(_BESIDE)]
    assert len(said) == 1, outcome.stderr[-3000:]
    assert re.match(r"(fairseq-[a-z-]+|launch|python -m [\w. ]+): error|error: ", said[0])
    assert len(said[0]) <= 800  # a list of all criterions is long
    return said[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][-60:])
def test_an_error_is_one_line(case, programs, tmp_path):
    (tmp_path / "file").touch()
    _damaged_copies(tmp_path)
    command, *fragments = case
    said = _said(programs.run(_words(command, tmp_path), CUDA_VISIBLE_DEVICES=""))
    for fragment in fragments:
        assert fragment.format(tmp=tmp_path) in said


@pytest.mark.parametrize("number", [0, 18, 48])
def test_a_process_of_its_own_prints_the_same(number, programs, tmp_path):
    """The others run forked from one that has made the imports (helpers/program_server.py)."""
    command, *_ = CASES[number]
    words = _words(command, tmp_path)
    real = subprocess.run(
        [sys.executable, *words] if words[0] == "-m" else words,
        cwd=ROOT, env=environment(CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore"), text=True,
        capture_output=True, timeout=100,
    )  # fmt: skip
    forked = programs.run(words, CUDA_VISIBLE_DEVICES="")
    assert real.returncode == forked.status
    assert _said(Outcome(real.returncode, real.stdout, real.stderr)) == _said(forked)


def test_a_full_disk_is_told_in_one_line_by_each_rank(programs, tmp_path):
    """As a limit on the size of files: the set of a run, on two ranks."""
    command = f"{TRAIN.replace(' --no-save', '')} --save-dir {tmp_path}/save"
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (20_000, 20_000))"
    done = programs.run(_words(command, tmp_path), ranks=2, prelude=limit, CUDA_VISIBLE_DEVICES="")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.status > 0 and len(errors) == 2 and "Traceback" not in done.text
    assert all("File too large" in line and f"{tmp_path}/save/" in line for line in errors)
    assert os.listdir(tmp_path / "save") == []


def test_the_traceback_can_be_had(programs, tmp_path):
    words = _words(f"fairseq-eval-lm {DATA} {EVAL} --path /no/x.pt", tmp_path)
    output = programs.run(words, CUDA_VISIBLE_DEVICES="", FAIRSEQ_TUTEL_TRACEBACK="1").stderr
    assert "Traceback" in output and "load_model_ensemble_and_task" in output


def test_there_are_many():
    assert len(CASES) >= 40 and os.path.isdir(ROOT / DATA)
