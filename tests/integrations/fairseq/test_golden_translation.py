"""Runs of Meta's own implementation for translation, repeated with the real fairseq commands.

tests/golden holds four runs of fairseq's branch ``nllb`` on one and two ranks (CPU, fp32), and what
its generator made of the weights (CONTRIBUTING.md). Its two ranks generate together; here
one process loads the set.
"""

import json
import re
from functools import cache

import pytest
import torch
from helpers.commands import ROOT
from helpers.golden import GOLDEN, arguments, assert_same_run

from fairseq_tutel.integrations.fairseq.models import TransformerMoE

RUNS = {
    "translation_top2_world1": 1,
    "translation_top2_world2": 2,
    "translation_top2_world2_sides": 2,
    "translation_top1_world2": 2,
}
WEIGHTS = [*((run, "final") for run in RUNS), ("translation_top2_world2", "trained")]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_golden_run(run, tmp_path, programs):
    words = arguments(run, "transformer_moe", "legacy_ddp", tmp_path)
    # fairseq starts a rank on every GPU that it sees, even with --cpu
    options = {"ranks": RUNS[run], "timeout": 150.0, "CUDA_VISIBLE_DEVICES": ""}
    done = programs.run(["fairseq-train", *words], **options)
    assert done.status == 0, done.text[-3000:]
    names = assert_same_run(run, RUNS[run], done.text, tmp_path, 1.01, 5e-4)
    sparse = {m[1] for name in names if (m := re.search(r"(\w+\.layers\.\d)\.moe_layer", name))}
    counts = {"translation_top2_world1": 4, "translation_top2_world2": 6}
    counts |= {"translation_top2_world2_sides": 4, "translation_top1_world2": 2}
    assert len(sparse) == counts[run]


@cache
def _translations(text):
    """First column -> numbers, and texts, of lines S, T, H, D and P."""
    found = {}
    for line in text.splitlines():
        if re.match(r"[STHDP]-\d", line):
            name, *columns = line.split("\t")
            numbers = columns.pop(0).split() if name[0] in "HDP" else []
            found[name] = [[float(number) for number in numbers], *columns]
    return found


def _generated(run, folder, beam):
    """Name of the file that Meta's generator printed, and the command that repeats it."""
    name = "generate" + "_trained" * (folder == "trained") + "_beam1" * (beam == 1)
    lines = (GOLDEN / run / "generate_args.txt").read_text().splitlines()
    (given,) = (line for line in lines if line.startswith(f"{name}.txt ("))
    # "name (ranks): data --path FILE options", with the overrides as one word between quotes
    command, overrides = given.partition(": ")[2].rsplit("--model-overrides", 1)
    data, *words = command.split()
    words[words.index("--path") + 1] = str(GOLDEN / run / folder / "checkpoint_last.pt")
    words += ["--model-overrides", overrides.strip().strip('"')]
    argv = ["fairseq-generate", str(GOLDEN / data), *words]
    return GOLDEN / run / f"{name}.txt", [*argv, "--user-dir", str(ROOT / "fairseq_tutel")]


@pytest.fixture(scope="module")
def printed(programs):
    """What each command of fairseq-generate prints; they share a process."""
    commands = [command for _, command in FILES.values()]
    asked = json.dumps([[False, command] for command in commands])
    done = programs.run(["-m", "several_programs"], text=asked, timeout=240.0)
    texts = re.split(r"^=== \d+$", done.stdout, flags=re.MULTILINE)[1:]
    assert len(texts) == len(commands), done.text[-3000:]
    return dict(zip(FILES, texts, strict=True))


FILES = {(*row, beam): _generated(*row, beam) for row in WEIGHTS for beam in (1, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("run, folder, beam", FILES)
def test_golden_translations(run, folder, beam, printed):
    file, _ = FILES[run, folder, beam]
    want, text = _translations(file.read_text()), printed[run, folder, beam]
    assert text.rstrip().endswith("ended"), text[-3000:]
    got = _translations(text)
    assert got.keys() == want.keys() and len(want) == 50
    for line, (scores, *texts) in want.items():
        tolerance = 1.01e-4 if line[0] == "P" else 1e-4  # P has four digits
        assert got[line][0] == pytest.approx(scores, abs=tolerance, rel=0), line
        assert got[line][1:] == texts, line


def test_from_pretrained_translates():
    """Any source of the file, by the set that Meta's code wrote; the best hypothesis is Meta's."""
    folder = GOLDEN / "translation_top2_world2"
    hub = TransformerMoE.from_pretrained(
        str(folder / "trained"), "checkpoint_last.pt", str(GOLDEN / "data_translation_world2"),
        moe_eval_capacity_token_fraction=1.0, use_moe_pad_mask=False,
    )  # fmt: skip
    want = _translations((folder / "generate_trained.txt").read_text())
    sources = {name[2:]: columns[1] for name, columns in want.items() if name[0] == "S"}
    with torch.no_grad():
        made = hub.translate(list(sources.values()), beam=4, max_len_a=1.2, max_len_b=8)
    for number, text in zip(sources, made, strict=True):
        assert text == want[f"H-{number}"][1]
