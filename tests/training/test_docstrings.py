"""Examples of docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

from fairseq_tutel import distributed, moe, training

MODULES = sorted(
    module.name
    for room in (training, distributed, moe)
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not result.failed
