"""Docstrings as a reference: the examples run, and each argument has a line with its type."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re

import pytest

from fairseq_tutel import distributed, moe, training

MODULES = sorted(
    module.name
    for room in (training, distributed, moe)
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
)
FUNCTIONS = {
    name: getattr(training, name)
    for name in training.__all__
    if inspect.isfunction(getattr(training, name)) and name != "all_ranks"
} | {
    "MoELayer": moe.MoELayer,
    "MoELayer.forward": functools.partial(moe.MoELayer.forward, None),
    "replace_ffn": moe.replace_ffn,
    "every_other": moe.every_other,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not result.failed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_has_a_line(name):
    function = FUNCTIONS[name]
    page = inspect.getdoc(getattr(function, "func", function))
    # a context manager's and a decorated function's own parameters
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.VAR_KEYWORD:
            line = rf"^    \*\*{argument.name}: "
        else:
            line = rf"^    {argument.name} \([\w.]+( or \w+| of [\w.]+|, [\w.]+)*\): "
        assert re.search(line, page, re.MULTILINE), argument.name
        optional = argument.default is not argument.empty
        assert not optional or "default" in page, argument.name
