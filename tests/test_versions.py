"""What stands about Python, torch and fairseq in setup.py, the scripts and the page agrees, and the
code calls nothing that the oldest omegaconf lacks; `scripts/test_hosts.sh`, which runs tests on the
official fairseq, is too large for every change."""

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "fairseq_tutel/integrations/fairseq/README.md").read_text()
# keywords of omegaconf 2.0.6, which fairseq 0.12.2 requires
OMEGACONF = {
    "create": {"parent"},
    "select": {"throw_on_missing"},
    "update": {"merge"},
    "to_container": {"resolve", "enum_to_str"},
}
# asks the function first whether it has the keyword
GUARDED = {("create", "flags")}


def pins(name):
    text = (ROOT / "scripts" / name).read_text()
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def test_omegaconf_is_called_as_2_0_can_be_called():
    for folder in ("fairseq_tutel", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "OmegaConf" in text else ():
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner, name = node.func.value, node.func.attr
                if isinstance(owner, ast.Name) and owner.id == "OmegaConf" and name in OMEGACONF:
                    newer = {word.arg for word in node.keywords} - OMEGACONF[name]
                    newer = {word for word in newer if (name, word) not in GUARDED}
                    assert not newer, f"{path}:{node.lineno}: OmegaConf.{name}({newer})"


def test_the_citation_is_of_this_version():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == importlib.metadata.version("fairseq_tutel")
    assert citation["license"] == "MIT" and citation["title"].startswith("fairseq_tutel")
    listed = (ROOT / "setup.py").read_text()
    cited = [each["url"] for each in citation["references"]]
    for url in re.findall(r"https://arxiv[^\"]+", listed):
        assert url in cited


def test_the_tests_of_the_other_host_exist():
    text = (ROOT / "scripts" / "test_hosts.sh").read_text()
    named = []
    for before, each, after in re.findall(r"\b(tests/[\w./]+)(?:\{([\w,]+)\})?([\w.]*)", text):
        named += [before + name + after for name in each.split(",")]
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists(), path


def test_there_is_no_torchaudio_that_cannot_be_imported():
    """fairseq-fixed requires one, and the one that pip finds is of another torch."""
    if importlib.util.find_spec("torchaudio") is not None:
        importlib.import_module("torchaudio")


def test_the_extras_have_the_pinned_versions():
    pinned = pins("constraints.txt") | pins("constraints-extras.txt")
    setup = (ROOT / "setup.py").read_text()
    for extra, count in (("vision", 2), ("export", 2), ("hosts", 6)):
        listed = re.search(rf'"{extra}": \[(.*?)\]', setup, re.DOTALL)[1]
        ranges = re.findall(r'"([\w-]+)([>=]=)([\d.]+)(?:,<([\d.]+))?"', listed)
        assert len(ranges) == listed.count('"') // 2 == count
        for name, relation, floor, below in ranges:
            numbers = [
                tuple(map(int, each.split("."))) for each in (floor, pinned[name], below or "9")
            ]
            assert numbers == sorted(numbers), name
            assert relation == ">=" or floor == pinned[name]


@pytest.mark.extras
def test_no_host_pulls_another_torch():
    pytest.importorskip("accelerate")
    from packaging.requirements import Requirement

    for name in pins("constraints-extras.txt"):
        if name in ("timm", "torchvision"):  # in a folder of their own
            continue
        for text in importlib.metadata.requires(name) or ():
            required = Requirement(text)
            if required.name == "torch" and required.marker is None:
                assert required.specifier.contains(pins("constraints.txt")["torch"]), name


def test_what_was_run_is_what_is_pinned():
    """The page's table names the versions that the environments are made with."""
    fixed, official = pins("constraints.txt"), pins("constraints-official.txt")
    first, last = re.findall(r"^\| 3\.\d+ \|.*hydra-core.*", PAGE, re.MULTILINE)
    for row, pinned, fairseq in (
        (first, fixed, "fairseq-fixed {fairseq-fixed}"),
        (last, official, "official {fairseq}"),
    ):
        cell = fairseq + " (hydra-core {hydra-core}, omegaconf {omegaconf})"
        assert row.split(" | ")[1:3] == [pinned["torch"], cell.format(**pinned)]
    setup = (ROOT / "setup.py").read_text()
    assert f'"fairseq=={official["fairseq"]}; ' in setup
    floor = re.search(r'"torch>=([\d.]+)"', setup)[1]
    assert official["torch"].startswith(floor + ".")
    oldest = re.search(r'python_requires=">=([\d.]+)"', setup)[1]
    assert last.startswith(f"| {oldest} |")
    target = re.search(r'target-version = "py(\d)(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert ".".join(target.groups()) == oldest
