"""The quickstarts of a language model and of translation as programs, on one's own files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
}
pytestmark = pytest.mark.long


@pytest.fixture
def quickstart(tmp_path):
    """Runs scripts/quickstart/main.py; returns what it printed, and the names of its files."""

    def run(*words):
        out, path = tmp_path / "out", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        program = [sys.executable, str(ROOT / "scripts" / "quickstart" / "main.py")]
        env = {"PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*program, *map(str, words), "--out", str(out)],
            capture_output=True, text=True, timeout=290, env={**os.environ, **env},
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout, {path.name for path in out.iterdir()}

    return run


def test_own_text_is_learnt_continued_and_exported(quickstart):
    output, names = quickstart(ROOT / "fairseq_tutel" / "integrations", "--updates", "8")
    assert "resumed from the checkpoint of update 4" in output
    assert len(re.findall(r"^      prompt: \S+ \S+ \S+ \S+\n      \| ", output, re.MULTILINE)) == 3
    valid, guess = (
        float(re.search(rf"^{row} +([\d,.]+)", output, re.MULTILINE)[1].replace(",", ""))
        for row in ("valid perplexity", "a guess among all pieces")
    )
    assert valid < guess
    evaluated = re.search(r"^fairseq-eval-lm, valid and test +([\d,.]+) and ", output, re.MULTILINE)
    assert float(evaluated[1].replace(",", "")) == pytest.approx(valid, rel=0.01)
    assert {"loss.png", "experts.png", "commands.sh", "checkpoints", "transformers"} <= names


def test_own_sentences_are_learnt_translated_and_drawn(quickstart, tmp_path):
    """Sentences of three words each, translated word by word: too few for BLEU."""
    files = []
    for language, numbers in WORDS.items():
        files.append(tmp_path / f"digits.{language}")
        lines = (" ".join(numbers[int(digit)] for digit in f"{i:03}") for i in range(1000))
        files[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    output, names = quickstart("--translation", *files, "--updates", "60")
    assert "resumed from the checkpoint of update 30" in output
    rows = re.findall(r"^(de-en|en-de|all) +([\d.]+) % +(-)$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["de-en", "en-de", "all"]
    assert len(re.findall(r"^      -> ", output, re.MULTILINE)) == 3
    assert {"languages.png", "experts.png", "loss.png", "commands.sh", "checkpoints"} <= names
