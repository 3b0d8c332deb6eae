"""Mixture-of-experts models of Hugging Face's transformers with this package's layer, and back.

:func:`replace_moe` replaces a sparse block of transformers 5 by a
:class:`~fairseq_tutel.moe.MoELayer` with the same weights. The router stays and computes the
logits, so transformers records them as before (``output_router_logits=True``, and the model's loss
from them). ``MODELS.md`` lists the models, ``FINETUNING.md`` leads through a fine-tuning.
``import fairseq_tutel.integrations.transformers.interface`` makes the argument
``experts_implementation="fairseq_tutel"`` known.
"""

from typing import TYPE_CHECKING

from .adapters import load_adapters, save_adapters
from .blocks import SPARSE_BLOCKS
from .nllb import repair_nllb_moe
from .replace import replace_moe
from .restore import original_state_dict, restore_moe

if TYPE_CHECKING:
    from .trainer import MoETrainer

__all__ = [
    "SPARSE_BLOCKS",
    "MoETrainer",
    "load_adapters",
    "original_state_dict",
    "repair_nllb_moe",
    "replace_moe",
    "restore_moe",
    "save_adapters",
]


def __getattr__(name: str):
    if name == "MoETrainer":  # imports transformers
        from .trainer import MoETrainer

        return MoETrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
