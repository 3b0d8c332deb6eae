"""Classes that may be unpickled: they hold data and do nothing when they are built.

Beside the tensors and containers of torch's restricted unpickler, fairseq's checkpoints hold
options, configs, numbers and arrays of numpy, and the dictionary of some tasks.
"""

import argparse
import collections
import contextlib
import importlib
import os
import sys
import threading
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# torch keeps one list of allowed classes per process, and the environment is the process's too
_ONE_AT_A_TIME = threading.RLock()
_RESTRICT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_DO_NOT_RESTRICT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

_OMEGACONF_CLASSES = (
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"),
    *("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata"),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "Boolean", "Float", "Integer", "String")),
    "omegaconf.nodes.ValueNode",
)
_FAIRSEQ_CLASSES = (
    "fairseq.data.dictionary.Dictionary",
    *(f"fairseq.logging.meters.{kind}Meter" for kind in ("Average", "Stopwatch", "Sum", "Time")),
)


@contextlib.contextmanager
def safe_globals_only() -> Iterator[None]:
    """Let every ``torch.load`` build only these classes, and those of ``add_safe_globals``.

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, with which many run fairseq since torch 2.6, has no effect.
    """
    with _ONE_AT_A_TIME:
        before = {name: os.environ.get(name) for name in (_RESTRICT, _DO_NOT_RESTRICT)}
        os.environ.pop(_DO_NOT_RESTRICT, None)
        os.environ[_RESTRICT] = "1"
        try:
            with torch.serialization.safe_globals(_safe_globals()):
                yield
        finally:
            os.environ.pop(_RESTRICT)
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _safe_globals() -> list[Any]:
    """Return the classes that can be imported; fairseq's only if fairseq is in use."""
    allowed: list[Any] = [
        *(argparse.Namespace, collections.OrderedDict, collections.defaultdict),
        *(bool, dict, float, int, list, set, str, tuple),
        (typing.Any, "typing.Any"),
        *_importable(_OMEGACONF_CLASSES),
        *_importable(_FAIRSEQ_CLASSES if "fairseq" in sys.modules else ()),  # importing it is slow
        *_numpy_values(),
    ]
    if torch.__version__ < (2, 6):
        allowed = [_named(*entry) if type(entry) is tuple else entry for entry in allowed]
    return allowed


def _named(value: Any, path: str) -> Any:
    """Return a function named ``path`` for torch 2.5, which allows a value only by its own name."""
    if f"{value.__module__}.{value.__name__}" == path:
        return value

    def called(*args):
        return value(*args)

    called.__module__, _, called.__name__ = path.rpartition(".")
    return called


def _importable(paths: Iterable[str]) -> Iterator[Any]:
    for path in paths:
        module, _, name = path.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):
            yield getattr(importlib.import_module(module), name)


def _numpy_values() -> list[Any]:
    """Return the classes and functions that rebuild numpy's numbers and arrays."""
    try:
        import numpy
    except ImportError:
        return []
    scalar = numpy.float64(0).__reduce__()[0]
    array = numpy.zeros(0).__reduce__()[0]
    kinds = ("f2", "f4", "f8", "bool", "u1", "u4", "u8", "i4", "i8")
    return [
        *(numpy.dtype, numpy.ndarray),
        *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
        *((array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *(type(numpy.dtype(kind)) for kind in kinds),
    ]
