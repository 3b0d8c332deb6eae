"""Tutel-style mixture of experts as a plugin for stock fairseq (``--user-dir fairseq_tutel``).

The layer alone needs torch only and imports nothing of fairseq::

    from fairseq_tutel import MoELayer, replace_ffn

:func:`register` makes fairseq know the package's models, criterions and hooks. fairseq's programs
import a user dir by themselves, and then it is called. Other programs call it before they use
fairseq with experts.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .moe import MoELayer, replace_ffn

__version__ = "0.1.0"
__all__ = ["MoELayer", "register", "replace_ffn"]


def register() -> None:
    """Register models, criterions and hooks with fairseq; idempotent.

    Raises:
        ImportError: fairseq is not installed.
    """
    from .integrations import fairseq
    from .integrations.fairseq.trainer.memory import count_memory_by
    from .plan.planner import memory_at_peak

    fairseq.register()
    count_memory_by(memory_at_peak)


def _in_user_dir() -> bool:
    """Return whether fairseq imports a user dir: this package, or one that imports this package.

    fairseq notes the path of a user dir before it imports it.
    """
    utils = sys.modules.get("fairseq.utils")
    return bool(getattr(getattr(utils, "import_user_module", None), "memo", None))


def __getattr__(name: str) -> Any:
    """Import the layer on first use; ``--user-dir`` and the planner do without torch."""
    if name in ("MoELayer", "replace_ffn"):
        from . import moe

        return getattr(moe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _in_user_dir():
    register()
