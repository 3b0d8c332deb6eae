"""Mixture-of-experts models of Hugging Face's transformers with this package's layer, and back.

::

    from fairseq_tutel import training
    from fairseq_tutel.integrations.transformers import (
        original_state_dict, replace_moe, restore_moe,
    )

    model = MixtralForCausalLM.from_pretrained(...)
    blocks = replace_moe(model)  # after init_process_group: each rank keeps its share of experts
    with training.collect_aux(model) as aux:
        loss = model(input_ids, labels=input_ids).loss
    (loss + 0.01 * aux.loss).backward()

    state = original_state_dict(model, blocks)  # all ranks call it, rank 0 has the result
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    restore_moe(model, blocks)  # or: put the original blocks back, on every rank

:func:`replace_moe` replaces a sparse block of transformers 5 by a
:class:`~fairseq_tutel.moe.MoELayer` with the same weights. The router stays and computes the
logits, so transformers records them as before (``output_router_logits=True``, and the model's loss
from them). No row is dropped, unless you ask for a capacity. ``MODELS.md`` lists the models.
``import fairseq_tutel.integrations.transformers.interface`` makes the argument
``experts_implementation="fairseq_tutel"`` known.
"""

from typing import TYPE_CHECKING

from .blocks import SPARSE_BLOCKS
from .nllb import repair_nllb_moe
from .replace import replace_moe
from .restore import original_state_dict, restore_moe

if TYPE_CHECKING:
    from .trainer import MoETrainer

__all__ = [
    "SPARSE_BLOCKS",
    "MoETrainer",
    "original_state_dict",
    "repair_nllb_moe",
    "replace_moe",
    "restore_moe",
]


def __getattr__(name: str):
    if name == "MoETrainer":  # imports transformers
        from .trainer import MoETrainer

        return MoETrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
