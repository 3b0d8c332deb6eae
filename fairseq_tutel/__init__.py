"""Tutel-style mixture of experts as a plugin for stock fairseq (``--user-dir fairseq_tutel``).

Importing the package registers the model, the criterion and the few hooks into fairseq where
fairseq is installed; :mod:`fairseq_tutel.moe`, the layer alone, works without it.
"""

import importlib.util
import sys

__version__ = "0.1.0"

# `python -m fairseq_tutel.launch` starts once per rank and uses neither torch nor fairseq:
# importing them would cost seconds. runpy sets argv[0] to "-m" while it imports the package.
_IS_LAUNCHER = sys.argv[:1] == ["-m"] and "fairseq_tutel.launch" in sys.orig_argv

if importlib.util.find_spec("fairseq") is not None and not _IS_LAUNCHER:
    from . import criterions, models, training  # noqa: F401  (registers them with fairseq)
