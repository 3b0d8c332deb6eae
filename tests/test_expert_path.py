"""Structure of the way through the experts: one path, few files, few names to learn."""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fairseq_tutel
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.experts import ExpertBank, base

PACKAGE = Path(fairseq_tutel.__file__).parent
ROOMS = ("ops", "moe", "backends", "distributed")
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for room in ROOMS
    for path in sorted((PACKAGE / room).rglob("*.py"))
}
PRIVATE = "backends/_torch_private.py"
MAX_FILES = 12

# of tensors and modules, whose names in the code are not known to be torch's
PRIVATE_OF_OBJECTS = {name for name in {*dir(torch.Tensor), *vars(nn.Module())} if name[0] == "_"}
# of choices that the plan and the holders of weights make
CHOICES = {"mode", "LoRAExperts", "HelpedExperts", "Int8", "InferenceExperts"}
HOLDERS = ("moe/experts/", "moe/call_plan.py", "ops/activation_memory.py")


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names(tree):
    """Line and text of each private name of torch: reached, asked for, or imported."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours |= {(a.asname or a.name).split(".")[0] for a in node.names if "torch" in a.name}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            ours |= {alias.asname or alias.name for alias in node.names}
            if any(map(is_private, [*node.module.split("."), *(a.name for a in node.names)])):
                yield node.lineno, ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            of_object = node.attr in PRIVATE_OF_OBJECTS and owner not in ("self", "super()")
            if owner.split(".")[0] in ours or of_object:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            if len(node.args) > 1 and re.match("f?'_(?!_)", ast.unparse(node.args[1])):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and re.match(r"torch[\w.]*\._", str(node.value)):
            yield node.lineno, node.value


def conditions_on_choices(tree):
    """Text of each condition on a mode, or on who holds the weights."""
    for node in ast.walk(tree):
        tests = [getattr(node, "test", None), getattr(node, "subject", None)]
        tests += [*getattr(node, "ifs", ()), node if isinstance(node, ast.Compare) else None]
        for test in filter(None, tests):
            names = {getattr(each, "attr", getattr(each, "id", None)) for each in ast.walk(test)}
            if names & CHOICES:
                yield ast.unparse(test)


BREAKING = [
    (private_names, "import torch\ntorch._C.x()"),
    (private_names, "from torch.autograd import forward_ad\nforward_ad._current_level"),
    (private_names, "from torch.utils._pytree import tree_map"),
    (private_names, "getattr(module, f'_{kind}_hooks')"),
    (private_names, "sys.modules['torch.distributed._x']"),
    (private_names, "weight._version"),
    (conditions_on_choices, "if memory.mode == 'fast':\n    pass"),
    (conditions_on_choices, "[x for x in y if type(x) is LoRAExperts]"),
]


@pytest.mark.parametrize("rule, source", BREAKING)
def test_the_rules_notice_what_breaks_them(rule, source):
    assert list(rule(ast.parse(source)))


def test_private_names_of_torch_stand_in_one_file():
    found = {file: list(private_names(tree)) for file, tree in TREES.items()}
    assert found.pop(PRIVATE)
    assert not {file: names for file, names in found.items() if names}


def test_the_plan_and_the_holders_alone_know_the_choices():
    found = {
        file: list(conditions_on_choices(tree))
        for file, tree in TREES.items()
        if not file.startswith(("distributed/", *HOLDERS))
    }
    assert not {file: conditions for file, conditions in found.items() if conditions}


def test_there_is_one_path():
    nodes = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree)]
    functions = [node for _, node in nodes if isinstance(node, ast.FunctionDef)]
    (whole,) = (node for node in functions if node.name == "dispatch_and_combine")
    first, last = whole.body[1], whole.body[-1]  # after the docstring
    assert last.end_lineno - first.lineno + 1 <= 12

    found = {
        f"{file}:{node.lineno}"
        for file, node in nodes
        if isinstance(node, (ast.ClassDef, ast.Call)) and not file.startswith("distributed/")
        for each in (node.bases if isinstance(node, ast.ClassDef) else node.args)
        if "autograd.Function" in ast.unparse(each) and ast.unparse(node)[:5] != "super"
        if getattr(node, "name", "") != "_LogitsAndTokens"  # of the gate
    }
    assert 0 < len(found) <= 3, found

    modules = [Path(file).stem for file in TREES if file.startswith(("ops/", "backends/"))]
    assert not [name for name in modules if re.search("lean|token|chunk|low_rank", name)]
    for backend in ("torch", "triton"):
        (imports,) = (
            node
            for node in TREES[f"backends/{backend}/__init__.py"].body
            if isinstance(node, ast.ImportFrom) and node.module == "expert_ffn"
        )
        exported = [name.name for name in imports.names if name.name.startswith("network_")]
        assert sorted(exported) == ["network_bwd", "network_bwd_params", "network_fwd"]


def test_there_are_few_names_to_learn():
    kinds = [each.kind for each in inspect.signature(MoELayer).parameters.values()]
    assert len(kinds) - kinds.count(inspect.Parameter.VAR_KEYWORD) <= 14
    methods = [name for name in vars(ExpertBank) if name[0] != "_"]
    methods = [name for name in methods if inspect.isfunction(vars(ExpertBank)[name])]
    assert len(methods) <= 6, methods
    # test_own_experts.py runs it
    assert (
        len(base.__doc__.split("::\n", 1)[1].split("\nThat is all")[0].strip().splitlines()) <= 25
    )


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def files_that_see(layer, x):
    """Files of the package with a frame that has the tokens, or the dispatched rows."""
    traced, files = [x], []  # holds the tensors, so that no other takes their memory

    def note(frame, event, result):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "return" and code is torch_backend.dispatch_fwd.__code__:
            traced.append(result)
        known = {tensor.untyped_storage().data_ptr() for tensor in traced}
        seen = tensors_in([*frame.f_locals.values()])
        if any(tensor.untyped_storage().data_ptr() in known for tensor in seen):
            files.append(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert len(traced) == 2
    return list(dict.fromkeys(files))


def test_tokens_pass_few_files_on_their_way_to_the_product():
    layer, x = MoELayer(16, 8, 16, capacity_factor=1.25, seed=1), torch.randn(4, 10, 16)
    layer(x)  # choices that are made once
    files = files_that_see(layer, x)
    assert {"moe/layer.py", "backends/torch/_expert_rows.py"} <= set(files)
    assert len(files) <= MAX_FILES, files
