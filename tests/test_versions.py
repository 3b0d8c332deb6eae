"""What stands about Python, torch and fairseq in setup.py, the scripts and the page agrees, and the
code calls nothing that the oldest omegaconf lacks; `scripts/test_hosts.sh`, which runs tests on the
official fairseq, is too large for every change."""

import ast
import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = (ROOT / "setup.py").read_text()
PAGE = (ROOT / "fairseq_tutel/integrations/fairseq/README.md").read_text()
# keywords of omegaconf 2.0.6, which fairseq 0.12.2 requires; create(flags) is asked for first
OMEGACONF = {
    "create": {"parent", "flags"}, "select": {"throw_on_missing"}, "update": {"merge"},
    "to_container": {"resolve", "enum_to_str"},
}  # fmt: skip


def pins(name):
    text = (ROOT / "scripts" / name).read_text()
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def test_omegaconf_is_called_as_2_0_can_be_called():
    for path in (
        each for room in ("fairseq_tutel", "scripts") for each in ROOT.glob(f"{room}/**/*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            known = OMEGACONF.get(called.removeprefix("OmegaConf."))
            if called.startswith("OmegaConf.") and known is not None:
                assert {word.arg for word in node.keywords} <= known, f"{path}:{node.lineno}"


def test_the_citation_is_of_this_version():
    version = importlib.metadata.version("fairseq_tutel")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_tests_of_the_other_host_exist():
    text = (ROOT / "scripts" / "test_hosts.sh").read_text()
    for before, each, after in re.findall(r"\b(tests/[\w./]+)(?:\{([\w,]+)\})?([\w.]*)", text):
        for name in each.split(","):
            assert (ROOT / (before + name + after)).exists(), before + name + after


def test_the_extras_have_the_pinned_versions():
    pinned = pins("constraints.txt") | pins("constraints-extras.txt")
    for extra, count in (("vision", 2), ("export", 2), ("hosts", 6)):
        listed = re.search(rf'"{extra}": \[(.*?)\]', SETUP, re.DOTALL)[1]
        ranges = re.findall(r'"([\w-]+)([>=]=)([\d.]+)(?:,<([\d.]+))?"', listed)
        assert len(ranges) == listed.count('"') // 2 == count
        for name, relation, *ends in ranges:
            texts = ends[0], pinned[name], ends[1] or "9"
            numbers = [tuple(map(int, each.split("."))) for each in texts]
            assert numbers == sorted(numbers), name
            assert relation == ">=" or ends[0] == pinned[name]


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
    assert f'"fairseq=={official["fairseq"]}; ' in SETUP
    floor = re.search(r'"torch>=([\d.]+)"', SETUP)[1]
    assert official["torch"].startswith(floor + ".")
    oldest = re.search(r'python_requires=">=([\d.]+)"', SETUP)[1]
    assert last.startswith(f"| {oldest} |")
