"""What README and the pages of the rooms say is true: options, commands, files, the layer alone."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
from helpers.commands import PAGES, ROOT, run

import fairseq_tutel

# fairseq is not to be found, as where it is not installed
_WITHOUT_FAIRSEQ = """
import sys
from importlib.machinery import PathFinder

class NoFairseq(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in ("fairseq", "fairseq_cli"):
            return super().find_spec(name, path, target)

sys.meta_path = [NoFairseq if f is PathFinder else f for f in sys.meta_path]
"""


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page):
    """The commands of a page's bash blocks, their continued lines joined."""
    for block in blocks(page, "bash"):
        yield from block.replace("\\\n", " ").splitlines()


def test_the_layer_alone_runs_without_fairseq():
    """The programs of README and of the layer's page, one after the other in one process."""
    programs = []
    for page in (ROOT / "README.md", ROOT / "fairseq_tutel" / "moe" / "README.md"):
        found = [b for b in blocks(page, "python") if "MoELayer(" in b and "init_process" not in b]
        assert found, page
        programs += [block.replace("range(100)", "range(20)") for block in found]
    program = "\n".join(programs) + "\nassert 'fairseq' not in sys.modules"
    printed = run([sys.executable, "-c", _WITHOUT_FAIRSEQ + program])
    assert re.search(r"^torch.Size\(\[16, 32, 64\]\)", printed, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)]*)\)", text):
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, target
    ending = r"\.(?:sh|py|sbatch|yaml|json)"
    for path in re.findall(rf"(?<![\w/])((?:scripts|configs|tests)/[\w./-]+{ending})", text):
        assert (ROOT / path).exists() or "NAME" in path, path
    for block in blocks(page, "python"):
        ast.parse(block)
    shell = "\n".join(blocks(page, "bash"))
    done = subprocess.run(["bash", "-n", "-c", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_fairseq_train_command_is_one(monkeypatch):
    """Parsed by fairseq, with this package's options; what they do is tested elsewhere."""
    pytest.importorskip("fairseq")
    from fairseq import options

    fairseq_tutel.register()  # which a program does as it imports its --user-dir
    monkeypatch.chdir(ROOT)
    seen = 0
    for line in (line for page in PAGES for line in commands(page)):
        words = shlex.split(line, comments=True)
        if "fairseq-train" in words and "..." not in words:
            arguments = words[words.index("fairseq-train") + 1 :]
            args = options.parse_args_and_arch(options.get_training_parser(), arguments)
            assert re.search("_moe(_|$)", args.arch), line  # one that is registered
            seen += 1
    assert seen >= 4


def test_every_hydra_command_composes():
    """With keys that the config has, and a plus sign before others."""
    pytest.importorskip("fairseq")
    from fairseq_tutel.plan.compose import load_config

    seen = 0
    for line in (line for page in PAGES for line in commands(page)):
        words = shlex.split(line, comments=True)
        if "fairseq-hydra-train" in words and "..." not in words:
            name = words[words.index("--config-name") + 1]
            changes = [word for word in words[words.index(name) + 1 :] if "=" in word]
            load_config(ROOT / "configs", name, changes)
            seen += 1
    assert seen >= 4


def test_readmes_command_is_the_recipes():
    """Which a test runs: tests/quickstart/test_whole_runs.py."""

    def flags(page):
        (line,) = [line for line in commands(page) if re.search("fairseq-train DATA +-", line)]
        return shlex.split(line.partition("fairseq-train DATA")[2])

    mine, recipe = flags(ROOT / "README.md"), flags(ROOT / "scripts/quickstart/README.md")
    assert set(mine) - set(recipe) == {"--max-update", "200"}
