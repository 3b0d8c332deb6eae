"""What README says about options and the layer alone is true."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

# fairseq is not to be found, as where it is not installed
_WITHOUT_FAIRSEQ = """
import sys
from importlib.machinery import PathFinder

class NoFairseq(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in ("fairseq", "fairseq_cli"):
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [NoFairseq if f is PathFinder else f for f in sys.meta_path]
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_option_table_lists_every_option_once():
    pytest.importorskip("fairseq")
    from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    from fairseq_tutel.criterions.moe_cross_entropy import MoECrossEntropyCriterionConfig
    from fairseq_tutel.models import TransformerLMGPTMoEConfig

    options = set()
    for ours, stock in (
        (TransformerLMGPTMoEConfig, TransformerLanguageModelConfig),
        (MoECrossEntropyCriterionConfig, CrossEntropyCriterionConfig),
    ):
        options |= set(ours.__dataclass_fields__) - set(stock.__dataclass_fields__)
    section = README[README.index("## Options") : README.index("## What differs")]
    listed = [name.replace("-", "_") for name in re.findall(r"^\| `--([\w-]+)`", section, re.M)]
    assert sorted(listed) == sorted(options)


def test_the_layer_alone_trains_without_fairseq():
    (program,) = [block for block in blocks("python") if "MoELayer(" in block]
    shorter = program.replace("range(100)", "range(20)")
    assert shorter != program
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _WITHOUT_FAIRSEQ + shorter + "\nassert 'fairseq' not in sys.modules",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"loss \d", done.stdout)


def test_files_that_readme_names_exist():
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(
        r"\b((?:scripts|configs|tests)/[\w./-]+\.(?:sh|py|sbatch|yaml))", README
    ):
        assert (ROOT / path).exists(), path


def test_help_tells_every_option_of_the_table(capsys):
    """python -m fairseq_tutel; fairseq-train --help ends before an architecture's options."""
    from fairseq_tutel.__main__ import main

    assert main([]) == 0
    told = capsys.readouterr().out
    section = README[README.index("## Options") : README.index("## What differs")]
    for name in re.findall(r"^\| `(--[a-z0-9-]+)`", section, re.MULTILINE):
        assert f"{name} " in told or f"{name}\n" in told, name
    assert "(default: 2)" in told  # where the text itself does not tell
