"""The commands of scripts/quickstart/README.md, run as they stand, on a small text."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "scripts" / "quickstart" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_train_evaluate_and_write(tmp_path):
    program = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
    shorter = program.replace("--max-update 200", "--max-update 3").replace("400", "4")
    shorter = shorter.replace("pip install sentencepiece tensorboardX\n", "")  # it is there
    assert "pip" not in shorter and "--max-update 3" in shorter
    page = ROOT / "fairseq_tutel/integrations/fairseq/options/TABLE.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    text = [line for line in lines if len(line.split()) > 3]
    (tmp_path / "train.txt").write_text("\n".join(2 * text[:-20]), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("\n".join(text[-20:]), encoding="utf-8")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", shorter],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "@ 3 updates)" in output and "Perplexity" in output
    assert re.search(r"^H-0\t", done.stdout, re.MULTILINE), output[-3000:]  # a hypothesis
    written = {path.name for path in (tmp_path / "board").iterdir()}
    assert written >= {"train", "valid"}
