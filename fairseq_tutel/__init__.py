"""Tutel-style mixture of experts as a plugin for stock fairseq (``--user-dir fairseq_tutel``).

Importing the package registers the model, the criterion and the few hooks into fairseq where
fairseq is installed; :mod:`fairseq_tutel.moe`, the layer alone, works without it.
"""

import importlib.util
import sys

__version__ = "0.1.0"


def _runs_own_command() -> bool:
    """Whether this is ``python -m fairseq_tutel.launch`` or the like.

    They do without fairseq, whose import takes seconds and sets up logging.
    """
    words = sys.orig_argv[1:-1]
    return any(
        word == "-m" and after.startswith("fairseq_tutel.")
        for word, after in zip(words, sys.orig_argv[2:], strict=True)
    )


if importlib.util.find_spec("fairseq") is not None and not _runs_own_command():
    from . import criterions, models, training  # noqa: F401  (registers them with fairseq)
