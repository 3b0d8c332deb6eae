"""Prepare the interpreter of a rank of fairseq's, then run the machine's own ``sitecustomize``.

Fairseq's imports are silenced, and lines are written whole. No other file of this package is
imported: a rank's interpreter may not have it.
"""

import importlib.machinery
import importlib.util
import io
import os
import runpy
import signal
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_QUIET = os.path.join(_HERE, "..", "quiet.py")

runpy.run_path(_QUIET)["silence_imports"]()
if isinstance(sys.stdout, io.TextIOWrapper):
    # other ranks write there, too; PYTHONUNBUFFERED would write each argument of print by itself
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
# Ctrl-C ends a rank that imports without a traceback: there is nothing to put in order
if signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
