"""Silence fairseq's imports in a rank, then run the machine's own ``sitecustomize``.

No other file of this package is imported: a rank's interpreter may not have it.
"""

import importlib.machinery
import importlib.util
import os
import runpy
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_QUIET = os.path.join(_HERE, "..", "..", "command_line", "quiet.py")

runpy.run_path(_QUIET)["silence_imports"]()

sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
