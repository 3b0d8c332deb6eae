"""FLOP formulas of operators, for torch's ``FlopCounterMode``.

They reach torch when a program imports ``torch.utils.flop_counter``, which costs half a second and
imports Triton.
"""

import functools
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder

import torch

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, Callable] = {}


def count_flops(name: str, formula: Callable) -> None:
    """Count the operator ``fairseq_tutel::name`` by a formula of its output and its arguments."""
    _formulas[name] = formula
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER], name)


def _register(counter, name: str) -> None:
    packet = getattr(torch.ops.fairseq_tutel, name)
    if packet in counter.flop_registry:  # this module was imported again
        return

    @counter.register_flop_formula(packet, get_raw=True)
    def count(*arguments, out_val=None, **_):
        return _formulas[name](out_val, *arguments)


class _Watcher:
    """Finder that registers the formulas as soon as torch's counter is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == _COUNTER else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)
        return spec


def _execute(execute: Callable, module) -> None:
    execute(module)
    for name in _formulas:
        _register(module, name)


sys.meta_path.insert(0, _Watcher)
