"""Who may import whom, and other rules of the code that reading its syntax trees can prove."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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
STANDARD_LIBRARY_ONLY = ("config/", "command_line/", "tuning/search/")
# only these talk to a person through stdout and stderr
COMMAND_LINES = {
    "__main__.py", "checkpoint/__main__.py", "export/__main__.py", "launch/cli.py", "plan/cli.py",
    "integrations/fairseq/errors/excepthook.py",
}  # fmt: skip

# what they import is named by a pickle, and by the table of replaced attributes of fairseq
COMPUTED_IMPORTS = ("checkpoint/safe_globals.py", "integrations/fairseq/hooks.py")
# rooms whose private names of torch stand in one file
PRIVATE_ROOMS, PRIVATE = ("ops/", "moe/", "backends/", "distributed/"), "backends/_torch_private.py"
# of tensors and modules, whose names in the code are not known to be torch's
PRIVATE_OF_OBJECTS = {name for name in {*dir(torch.Tensor), *vars(nn.Module())} if name[0] == "_"}

TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(), filename=str(path))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(file):
    """config.py and rooms/x.py -> the name of the room; "" for the package's own __init__."""
    first, *rest = Path(file).parts
    if len(rest) > 1 and (inner := f"{first}/{rest[0]}") in set().union(*LINES):
        return inner
    first = first.removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(file, tree):
    """(line, absolute name) of what a file imports or has of torch; ``from a import b`` is a.b."""
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "resolve_name")
        ):
            (name, *_) = node.args
            base = ast.unparse(node)
            if isinstance(name, ast.Constant):
                base = importlib.util.resolve_name(name.value, ".".join(package))
            yield node.lineno, base


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
        if module.endswith(")") and file not in COMPUTED_IMPORTS:
            yield f"{file}:{line}: {module} hides what is imported"
        own = {"fairseq_tutel", *sys.stdlib_module_names}
        if file.startswith(STANDARD_LIBRARY_ONLY) and top not in own:
            yield f"{file}:{line}: {room} uses the standard library only, not {module}"


def private_names(file, tree):
    """Line and text of each private name of torch: reached, asked for, or imported."""
    ours = {"torch", "F", "nn"}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.expr | ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            ours |= {alias.asname or alias.name for alias in node.names}
            if re.search(r"[. ]_(?!_)", text):
                yield node.lineno, text
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            owner = ast.unparse(node.value)
            of_object = node.attr in PRIVATE_OF_OBJECTS and owner not in ("self", "super()")
            if owner.split(".")[0] in ours or of_object:
                yield node.lineno, text
        elif re.match(r"\w*attr\([^,]+, f?'_(?!_)", text):
            yield node.lineno, text
        elif isinstance(node, ast.Constant) and re.match(r"torch[\w.]*\._", str(node.value)):
            yield node.lineno, node.value


def nodes(*kinds):
    """(file:line, node) of every file's nodes of some kinds."""
    every = ((file, node) for file, tree in TREES.items() for node in ast.walk(tree))
    return [(f"{file}:{node.lineno}", node) for file, node in every if isinstance(node, kinds)]


def test_imports_follow_the_lines_of_the_page():
    assert not [text for file, tree in TREES.items() for text in wrong_imports(file, tree)]
    rooms = {room_of(file) for file in TREES} - {""}
    assert rooms == set().union(*LINES) >= set().union(*OWNERS.values())
    absolute = [(place, node.module) for place, node in nodes(ast.ImportFrom) if not node.level]
    assert not [place for place, name in absolute if name.split(".")[0] == "fairseq_tutel"]


def test_private_names_of_torch_stand_in_one_file():
    found = {f: list(private_names(f, t)) for f, t in TREES.items() if f.startswith(PRIVATE_ROOMS)}
    assert found.pop(PRIVATE)
    assert not {file: names for file, names in found.items() if names}


def test_files_are_short():
    lengths = {file: len((PACKAGE / file).read_text().splitlines()) for file in TREES}
    assert not {file: count for file, count in lengths.items() if count >= MAX_LINES}


def test_no_bare_or_silent_except():
    for place, node in nodes(ast.ExceptHandler):
        assert node.type is not None, f"{place}: bare except"
        silent = all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body)
        assert not (silent and "Exception" in ast.unparse(node.type).split(".")[-1]), place


def test_only_command_lines_print():
    calls = {place for place, node in nodes(ast.Call) if ast.unparse(node.func) == "print"}
    assert not {place for place in calls if place.split(":")[0] not in COMMAND_LINES}


def test_modules_and_what_they_offer_have_docstrings():
    for file, tree in TREES.items():
        kinds = ast.FunctionDef, ast.ClassDef
        public = [node for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]
        for node in (tree, *public):
            assert ast.get_docstring(node), f"{file}: {getattr(node, 'name', '')} has no docstring"


BREAKING = [
    (wrong_imports, "config/a.py", "import torch"),
    (wrong_imports, "backends/triton/a.py", "from ..torch import x"),
    (wrong_imports, "backends/torch/a.py", "from fairseq_tutel.backends import triton"),
    (wrong_imports, "distributed/a.py", "def f():\n    from ..moe import x"),
    (wrong_imports, "moe/a.py", "import torch\ntorch.distributed.barrier()"),
    (wrong_imports, "moe/a.py", "from importlib import import_module\nimport_module(home)"),
    (wrong_imports, "training/a.py", "import torch.distributed as dist"),
    (wrong_imports, "backends/torch/a.py", "import triton.language as tl"),
    (wrong_imports, "launch/a.py", "from ..plan import x"),
    (private_names, "", "import torch\ntorch._C.x()"),
    (private_names, "", "from torch.autograd import forward_ad\nforward_ad._current_level"),
    (private_names, "", "from torch.utils._pytree import tree_map"),
    (private_names, "", "getattr(module, f'_{kind}_hooks')"),
    (private_names, "", "sys.modules['torch.distributed._x']"),
    (private_names, "", "weight._version"),
]


@pytest.mark.parametrize("rule, file, source", BREAKING)
def test_the_rules_notice_what_breaks_them(rule, file, source):
    assert list(rule(file, ast.parse(source)))


def test_test_files_have_names_of_their_own():
    """pytest imports them by their names alone: of two that are one, a run of all collects none."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
