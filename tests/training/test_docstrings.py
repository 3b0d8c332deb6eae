"""Docstrings as a reference: the examples run, and each argument has a line with its type."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

from fairseq_tutel import distributed, training

MODULES = sorted(
    module.name
    for room in (training, distributed)
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
)
FUNCTIONS = [name for name in training.__all__ if inspect.isfunction(getattr(training, name))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not result.failed


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "all_ranks"])
def test_each_argument_has_a_line(name):
    function = getattr(training, name)
    page = inspect.getdoc(function)
    # a context manager's and a decorated function's own parameters
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.VAR_KEYWORD:
            line = rf"^    \*\*{argument.name}: "
        else:
            line = rf"^    {argument.name} \([\w.]+( or \w+| of [\w.]+)*\): "
        assert re.search(line, page, re.MULTILINE), argument.name
        optional = argument.default is not argument.empty
        assert not optional or "default" in page, argument.name
