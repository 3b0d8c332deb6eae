"""Tutel-style mixture of experts as a plugin for stock fairseq (``--user-dir fairseq_tutel``).

The layer alone needs torch and numpy and imports nothing of fairseq::

    from fairseq_tutel import MoELayer, replace_ffn

fairseq's programs import a user dir by themselves, and the package then registers its model, its
criterion and the few hooks with fairseq. A program that uses fairseq as a library calls
:func:`register`, or imports what it needs of ``fairseq_tutel.integrations.fairseq``.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .moe import MoELayer, replace_ffn

__version__ = "0.1.0"
__all__ = ["MoELayer", "register", "replace_ffn"]


def register() -> None:
    """Register the model and the criterion with fairseq and install the hooks; idempotent.

    Raises:
        ImportError: fairseq is not installed.
    """
    from .integrations.fairseq.trainer.memory import count_memory_by
    from .plan.planner import memory_at_peak

    count_memory_by(memory_at_peak)


def __getattr__(name: str) -> Any:
    """Import the layer when it is asked for; ``--user-dir`` and the planner do without torch."""
    if name in ("MoELayer", "replace_ffn"):
        from . import moe

        return getattr(moe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "fairseq.utils" in sys.modules:  # the module by which fairseq imports a --user-dir
    register()
