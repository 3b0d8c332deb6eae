"""Who may import whom, and other rules of the code that reading its syntax trees can prove."""

import ast
import re
import sys
from pathlib import Path

import pytest

import fairseq_tutel

PACKAGE = Path(fairseq_tutel.__file__).parent
MAX_LINES = 400
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")


def table(title):
    """Rows of the first table after `title` in the page, as lists of the names in each cell."""
    rows = re.search(r"^\|[- |]+\|\n((?:\|.*\n)+)", PAGE[PAGE.index(title) :], re.MULTILINE)[1]
    return [
        [re.findall(r"`([\w/.]+)`", cell) for cell in row.split("|")[1:-1]]
        for row in rows.splitlines()
    ]


# a room imports from rooms of earlier lines only; rooms of one line do not import each other
LINES = tuple(set(rooms) for rooms, _ in table("## Who may import whom"))
# outside package -> rooms that may import it
OWNERS = {package: set(rooms) for (package,), rooms in table("Packages that only some rooms")}
STANDARD_LIBRARY_ONLY = {
    "registry", "ranges", "config", "exit_codes", "shipped_configs", "command_line", "tuning",
}  # fmt: skip
# only these talk to a person through stdout and stderr
COMMAND_LINES = {
    "__main__.py", "checkpoint/__main__.py", "launch/cli.py", "plan/cli.py",
    "hosts/fairseq/excepthook.py",
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(), filename=str(path))
    for path in FILES
}


def room_of(file):
    """config.py and rooms/x.py -> the name of the room; "" for the package's own __init__."""
    first, *rest = Path(file).parts
    if len(rest) > 1 and (inner := f"{first}/{rest[0]}") in set().union(*LINES):
        return inner
    first = first.removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(file, tree):
    """(line, absolute module name) of everything a file imports or names as an attribute of torch.

    ``from a import b`` counts as a.b: b may be a module.
    """
    package = ["fairseq_tutel", *Path(file).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def wrong_imports(file, tree):
    """Messages about imports against the rules."""
    room = room_of(file)
    level = {name: i for i, line in enumerate(LINES) for name in line}
    for line, module in imported_modules(file, tree):
        top, *rest = module.split(".")
        if top == "fairseq_tutel" and room:
            other = room_of("/".join([*rest, "x"])) if rest else ""
            if other in level and other != room and level[other] >= level[room]:
                yield f"{file}:{line}: {room} imports {other}, which comes later or beside it"
        for owned, owners in OWNERS.items():
            if (module == owned or module.startswith(f"{owned}.")) and room not in owners:
                yield f"{file}:{line}: {module} belongs to {', '.join(sorted(owners))}"
        if room in STANDARD_LIBRARY_ONLY and top not in {"fairseq_tutel", *sys.stdlib_module_names}:
            yield f"{file}:{line}: {room} uses the standard library only, not {module}"


@pytest.mark.parametrize("file", TREES)
def test_imports_follow_the_lines(file):
    assert room_of(file) in {"", *set().union(*LINES)}, f"{file} is in no room"
    assert not list(wrong_imports(file, TREES[file]))


@pytest.mark.parametrize("file", TREES)
def test_rooms_import_each_other_relatively(file):
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module.split(".")[0] != "fairseq_tutel", f"{file}:{node.lineno}"


@pytest.mark.parametrize("file", TREES)
def test_files_are_short(file):
    count = len((PACKAGE / file).read_text().splitlines())
    assert count < MAX_LINES, f"{count} lines"


@pytest.mark.parametrize("file", TREES)
def test_no_bare_or_silent_except(file):
    for node in ast.walk(TREES[file]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"{file}:{node.lineno}: bare except"
        caught = ast.unparse(node.type)
        silent = all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body)
        if "Exception" in caught.split(".")[-1]:
            assert not silent, f"{file}:{node.lineno}: except {caught} and silence"


@pytest.mark.parametrize("file", [f for f in TREES if f not in COMMAND_LINES])
def test_only_command_lines_print(file):
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "pprint"):
            raise AssertionError(f"{file}:{node.lineno}: print")


@pytest.mark.parametrize("file", TREES)
def test_modules_and_what_they_offer_have_docstrings(file):
    tree = TREES[file]
    assert ast.get_docstring(tree), f"{file}: no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{file}:{node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize(
    "file, source",
    [
        ("config.py", "import torch"),
        ("backends/triton/a.py", "from ..torch import x"),
        ("backends/torch/a.py", "from fairseq_tutel.backends import triton"),
        ("ops/a.py", "from fairseq_tutel.distributed import x"),
        ("distributed/a.py", "def f():\n    from ..moe import x"),
        ("moe/a.py", "import torch.distributed as dist"),
        ("moe/a.py", "from torch import distributed"),
        ("moe/a.py", "import torch\ntorch.distributed.barrier()"),
        ("checkpoint/a.py", "import torch.distributed"),
        ("checkpoint/a.py", "from fairseq import utils"),
        ("hosts/a.py", "from fairseq import utils"),
        ("hosts/a.py", "import torch.distributed as dist"),
        ("hosts/a.py", "from .fairseq import x"),
        ("checkpoint/a.py", "from ..hosts import x"),
        ("backends/torch/a.py", "import triton.language as tl"),
        ("models/a.py", "from ..hosts.fairseq import x"),
        ("moe/a.py", "import fairseq_tutel.models"),
        ("launch/a.py", "from ..plan import x"),
        ("models/a.py", "import fairseq_cli.train"),
    ],
)
def test_the_rules_notice_what_breaks_them(file, source):
    assert list(wrong_imports(file, ast.parse(source)))


@pytest.mark.parametrize(
    "file, source",
    [
        ("backends/triton/a.py", "import triton\nfrom ._runtime import x"),
        ("ops/a.py", "from ..backends import torch as torch_backend"),
        ("moe/a.py", "from .. import ops\nfrom ..config import MoEConfig\nfrom .routing import y"),
        ("hosts/fairseq/a.py", "from fairseq.trainer import Trainer\nfrom ... import optim"),
        ("plan/a.py", "from fairseq_tutel.config import MoEConfig"),
    ],
)
def test_the_rules_allow_what_is_meant(file, source):
    assert not list(wrong_imports(file, ast.parse(source)))


def test_the_page_names_the_rooms_that_there_are():
    rooms = {room_of(file) for file in TREES} - {""}
    assert rooms == set().union(*LINES)
    assert rooms >= set().union(*OWNERS.values()) | STANDARD_LIBRARY_ONLY


def test_test_files_have_names_of_their_own():
    """pytest imports them by their names alone: of two that are one, a run of all collects none."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
