"""The quickstart for translation as a program, on one's own files, for a few updates."""

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


@pytest.mark.long
def test_own_files_are_learnt_translated_and_drawn(tmp_path):
    """Sentences of three words each, translated word by word: too few for BLEU."""
    files = []
    for language, names in WORDS.items():
        files.append(tmp_path / f"digits.{language}")
        lines = (" ".join(names[int(digit)] for digit in f"{i:03}") for i in range(1000))
        files[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    out = tmp_path / "out"
    program = [sys.executable, str(ROOT / "scripts" / "quickstart" / "main.py"), "--translation"]
    done = subprocess.run(
        [*program, *map(str, files), "--updates", "60", "--out", str(out)],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "resumed from the checkpoint of update 30" in output
    rows = re.findall(r"^(de-en|en-de|all) +([\d.]+) % +(-)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["de-en", "en-de", "all"]
    assert len(re.findall(r"^      -> ", done.stdout, re.MULTILINE)) == 3
    names = {"languages.png", "experts.png", "loss.png", "commands.sh", "checkpoints"}
    assert names <= {path.name for path in out.iterdir()}
