"""What fairseq's programs print on two ranks is what one process prints, or a refusal.

The table has every output of fairseq-eval-lm, -generate, -validate and -interactive, for an odd
number of batches and for one batch on two ranks, as the launcher and as torchrun starts them.
The models are golden runs of Meta's code.
"""

import functools
import json
import re

import pytest
from helpers.commands import ROOT, free_port

GOLDEN = ROOT / "tests/golden"
COMMON = "--user-dir fairseq_tutel --cpu --num-workers 0 --log-format json"
LM = f"{GOLDEN}/data_world2 {COMMON} --path {GOLDEN}/top2_world2/final/checkpoint_last.pt"
PAIRS = (
    f"{GOLDEN}/data_translation_world2 {COMMON} -s de -t en --gen-subset test --max-len-b 8 --path "
    f"{GOLDEN}/translation_top2_world2/final/checkpoint_last.pt --beam 2"
)
SCORED = f"fairseq-eval-lm {LM} --gen-subset valid --tokens-per-sample 16"  # 32 blocks
WORDS = f"{SCORED} --output-word-probs --output-word-stats"
TEXTS = (  # 12 of them
    f"fairseq-generate {LM} --gen-subset valid --task language_modeling --sample-break-mode eos "
    "--tokens-per-sample 32 --prefix-size 2 --max-len-b 6 --beam 2"
)
TRANSLATED = f"fairseq-generate {PAIRS}"  # 10 of them
VALIDATED = f"fairseq-validate {LM} --task language_modeling --valid-subset valid"  # 16 blocks
READ = f"fairseq-interactive {PAIRS.replace('--gen-subset test', '')}"
TORCHRUN, LAUNCHER, EOS = "torchrun", "launcher", "--sample-break-mode eos"


def over(**options):
    whole = {"moe_eval_capacity_token_fraction": None}  # drops depend on the batches of a step
    return "--model-overrides " + repr(whole | options).replace(" ", "")


# commands and how they are started
QUICK = [
    (f"{WORDS} --batch-size 24 --context-window 8", TORCHRUN),  # three batches
    (f"{WORDS} --batch-size 99", LAUNCHER),  # one
    (f"{TRANSLATED} --batch-size 4", TORCHRUN),
    (f"{TRANSLATED} --batch-size 99 --scoring sacrebleu", LAUNCHER),
    (f"{VALIDATED} --batch-size 6", TORCHRUN),
]
LONG = [
    (f"{SCORED} --batch-size 12 {over(moe_expert_dtype='bf16')}", LAUNCHER),
    (f"{SCORED} --batch-size 12 {over(moe_map_experts=True)}", TORCHRUN),
    (f"{SCORED} --batch-size 12 {over(moe_expert_parallel_size=1)}", LAUNCHER),
    (f"{SCORED} --batch-size 99 --context-window 4 {over(moe_expert_dtype='int8')}", LAUNCHER),
    (f"{WORDS} --batch-size 5 --post-process subword_nmt {EOS} {over()}", TORCHRUN),
    (f"{TEXTS} --batch-size 4 {over(moe_map_experts=True)}", TORCHRUN),
    (f"{TEXTS} --batch-size 4 {over(moe_expert_parallel_size=2)}", LAUNCHER),
    (f"{TEXTS} --batch-size 99 {over(moe_expert_parallel_size=2)}", TORCHRUN),
    (f"{TRANSLATED} --batch-size 4 --score-reference", LAUNCHER),
    (f"{TRANSLATED} --batch-size 4 --print-alignment hard --nbest 2", TORCHRUN),
    (f"{TRANSLATED} --batch-size 99 --quiet --scoring chrf --post-process", LAUNCHER),
    (f"{VALIDATED} --batch-size 99 {over(moe_expert_dtype='int8')}", LAUNCHER),
]
NO_TASK = TEXTS.partition(" --task")[0]
# refused before work starts
REFUSED = [
    (f"{TRANSLATED} --results-path results", "--results-path results is one file"),
    (f"{NO_TASK} --batch-size 4", "give --task language_modeling"),
    (f"{READ} --input none", "in one process, and torchrun started 2"),
]
TABLES = {"quick": QUICK, "long": LONG}


@pytest.fixture(scope="module")
def printed(programs):
    """Function (table, ranks) -> what each rank printed, by command."""

    @functools.cache
    def run(table, ranks):
        rows = TABLES[table]
        if ranks == 2 and table == "quick":
            rows = rows + [(command, TORCHRUN) for command, _ in REFUSED]
        asked = [[how == LAUNCHER, command.split()] for command, how in rows]
        if ranks == 1:
            asked = json.loads(json.dumps(asked).replace("parallel_size':2", "parallel_size':1"))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        start = {"ranks": ranks, "launched": False, "text": json.dumps(asked), "timeout": 140}
        done = programs.run(["-m", "several_programs"], **start, **place)
        texts = re.split(r"^(?:\[rank 1\] )?=== \d+$", done.stdout, flags=re.MULTILINE)[1:]
        assert len(texts) == ranks * len(rows), done.text[-3000:]
        by_rank = [texts[i : i + len(rows)] for i in range(0, len(texts), len(rows))]
        return dict(zip([row[0] for row in rows], zip(*by_rank, strict=True), strict=True))

    return run


def said(text):
    """Lines of results, sorted, without the time of day, seconds and the rank."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"^\[rank 1\] ", "", line)
        line = re.sub(r"^.*? \| INFO \| (fairseq_cli\.\w+|valid) \| ", "", line)
        line = re.sub(r" in [\d.]+s \(.*", "", line)
        line = re.sub(r"^.*All 2 ranks together evaluated (\d+)", r"Evaluated \1", line)
        # the load of ranks is that of several; a metric that an option turns off may be missing
        line = re.sub(r', "valid_moe_util_rank": "[^"]*"|, "valid_wps.*', "", line)
        if re.match(r'([STHDPA]-)?\d+\s|Translated|Generate|Evaluated|Loss|\S+\t|\{"valid', line):
            found.append(line)
    return sorted(found)


def numbers(line):
    """(words, numbers) of a line."""
    parts = re.split(r"(-?\d+\.\d+(?:e-\d+)?)", line)
    return parts[::2], [float(number) for number in parts[1::2]]


def rows_of(table, *marks):
    commands = [row[0] for row in TABLES[table]]
    names = [re.sub(r"\S*/\S*|--user.*?json|--path|-s de.*beam 2", "", each) for each in commands]
    return [
        pytest.param(table, command, id=" ".join(name.split()), marks=marks)
        for name, command in zip(names, commands, strict=True)
    ]


@pytest.mark.parametrize("table, command", [*rows_of("quick"), *rows_of("long", pytest.mark.long)])
def test_two_ranks_print_what_one_process_prints(printed, table, command):
    (one,) = printed(table, 1)[command]
    two = printed(table, 2)[command]
    for text in (one, *two):
        assert text.rstrip().endswith("ended"), text[-2000:]
    want, got = said(one), said("".join(two))
    assert len(want) > 1 or "validate" in command
    assert len(got) == len(want), "\n".join(map(repr, set(got) ^ set(want)))
    for mine, theirs in zip(sorted(map(numbers, got)), sorted(map(numbers, want)), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=2e-4, rel=1e-4)


@pytest.mark.parametrize("command, message", REFUSED)
def test_what_two_ranks_cannot_do_is_refused_before_work_starts(printed, command, message):
    for text in printed("quick", 2)[command]:
        assert message in text.splitlines()[-1]
        assert "loading model" not in text
