"""Tutel's own interface, for programs that import ``tutel``: :mod:`moe`, :mod:`net`, :mod:`system`.

``install()`` puts it in Tutel's place; ``python -m fairseq_tutel.integrations.tutel PROGRAM ARGS``
does so for a program. The page is ``fairseq_tutel/integrations/tutel/README.md``.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from . import moe, net, system

_NAMES = {"moe": moe, "net": net, "system": system}


def install(force: bool = False) -> None:
    """Make ``import tutel`` give this package.

    Raise ImportError if Tutel is installed, or imported, unless ``force``.
    """
    present: Any = sys.modules.get("tutel")
    if getattr(present, "install", None) is install:
        return
    if not force and (present or importlib.util.find_spec("tutel")):
        raise ImportError("Tutel is installed: uninstall it, or call install(force=True)")
    module = ModuleType("tutel", __doc__)
    vars(module).update(_NAMES, install=install, __getattr__=_refuse)
    sys.modules["tutel"] = module
    sys.modules.update({f"tutel.{name}": each for name, each in _NAMES.items()})


def _refuse(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"tutel.{name} is not offered, only {', '.join(_NAMES)}: inference, kernels of one's own "
        "and launchers are Tutel's"
    )
