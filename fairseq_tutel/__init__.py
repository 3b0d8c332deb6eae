"""Tutel-style mixture of experts as a plugin for stock fairseq (``--user-dir fairseq_tutel``).

:mod:`fairseq_tutel.moe`, the layer alone, needs torch and numpy and imports nothing of fairseq.
fairseq's programs import a user dir by themselves, and the package then registers its model, its
criterion and the few hooks with fairseq. A program that uses fairseq as a library calls
:func:`register`, or imports what it needs of ``fairseq_tutel.integrations.fairseq``.
"""

import sys

__version__ = "0.1.0"


def register() -> None:
    """Register the model and the criterion with fairseq and install the hooks; idempotent.

    Raises:
        ImportError: fairseq is not installed.
    """
    from .integrations.fairseq.trainer.memory import count_memory_by
    from .plan.planner import memory_at_peak

    count_memory_by(memory_at_peak)


if "fairseq.utils" in sys.modules:  # the module by which fairseq imports a --user-dir
    register()
