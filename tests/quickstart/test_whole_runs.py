"""The quickstarts as programs, on one's own files, and the commands of their page as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"
WORDS = {
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
}
pytestmark = pytest.mark.long


def run(command, folder):
    """Return what a command printed."""
    env = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    how = {"capture_output": True, "text": True, "timeout": 290, "cwd": folder}
    done = subprocess.run(list(map(str, command)), **how, env={**os.environ, **env})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def quickstart(folder, *words):
    """Return what scripts/quickstart/main.py printed, and the names of its files."""
    output = run([sys.executable, QUICKSTART / "main.py", *words, "--out", "out"], folder)
    return output, {path.name for path in (folder / "out").iterdir()}


def numbers(pattern, output):
    (found,) = re.findall(pattern, output, re.MULTILINE)
    return float(found.replace(",", ""))


def test_own_text_is_learnt_continued_and_exported(tmp_path):
    text = ROOT / "fairseq_tutel" / "integrations"
    output, names = quickstart(tmp_path, text, "--updates", "8")
    assert "resumed from the checkpoint of update 4" in output
    assert len(re.findall(r"^      prompt: \S+ \S+ \S+ \S+\n      \| ", output, re.MULTILINE)) == 3
    valid = numbers(r"^valid perplexity +([\d,.]+)", output)
    assert valid < numbers(r"^a guess among all pieces +([\d,.]+)", output)
    evaluated = numbers(r"^fairseq-eval-lm, valid and test +([\d,.]+) and ", output)
    assert evaluated == pytest.approx(valid, rel=0.01)
    assert {"loss.png", "experts.png", "commands.sh", "checkpoints", "transformers"} <= names


def test_own_sentences_are_learnt_translated_and_drawn(tmp_path):
    """Sentences of three words each, translated word by word: too few for BLEU."""
    for language, digits in WORDS.items():
        lines = (" ".join(digits[int(digit)] for digit in f"{i:03}") for i in range(1000))
        (tmp_path / f"digits.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [f"digits.{language}" for language in WORDS]
    output, names = quickstart(tmp_path, "--translation", *files, "--updates", "60")
    assert "resumed from the checkpoint of update 30" in output
    rows = re.findall(r"^(de-en|en-de|all) +[\d.]+ % +-$", output, re.MULTILINE)
    assert rows == ["de-en", "en-de", "all"]
    assert len(re.findall(r"^      -> ", output, re.MULTILINE)) == 3
    assert {"languages.png", "experts.png", "loss.png", "commands.sh", "checkpoints"} <= names


@pytest.mark.parametrize("recipe, written", [("--speech", 3), ("--bart", 0)])
def test_both_models_are_trained_and_compared(recipe, written, tmp_path):
    output, _ = quickstart(tmp_path, recipe, "--updates", "12")
    rows = re.findall(r"^(dense|moe) +[\d.]+   \(seeds 1 to 1: ", output, re.MULTILINE)
    assert rows == ["dense", "moe"]
    assert len(re.findall(r"^      model: ", output, re.MULTILINE)) == written


def test_the_commands_of_the_page_train_evaluate_and_write(tmp_path):
    page = (QUICKSTART / "README.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    shorter = program.replace("--max-update 200", "--max-update 3").replace("400", "4")
    shorter = shorter.replace("pip install sentencepiece tensorboardX\n", "")  # it is there
    assert "pip" not in shorter and "--max-update 3" in shorter
    table = ROOT / "fairseq_tutel/integrations/fairseq/options/TABLE.md"
    lines = table.read_text(encoding="utf-8").splitlines()
    text = [line for line in lines if len(line.split()) > 3]
    (tmp_path / "train.txt").write_text("\n".join(2 * text[:-20]), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("\n".join(text[-20:]), encoding="utf-8")
    output = run(["bash", "-e", "-o", "pipefail", "-c", f"exec 2>&1\n{shorter}"], tmp_path)
    assert "@ 3 updates)" in output and "Perplexity" in output
    assert re.search(r"^H-0\t", output, re.MULTILINE), output[-3000:]  # a hypothesis
    assert {path.name for path in (tmp_path / "board").iterdir()} >= {"train", "valid"}
