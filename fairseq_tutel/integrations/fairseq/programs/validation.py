"""Makes ``fairseq-validate`` work with experts on several ranks, which share the data.

Stock skips the pass of a rank without a last batch, but the other ranks wait for its experts.
"""

import base64
import logging
import pickle
from typing import Any

from fairseq.utils import apply_to_sample, move_to_cpu

from ....distributed import gather_texts, process_world
from ..criterions.moe_criterion import join_passes
from . import program
from .trace import leave_out_next


def share_validation(task) -> None:
    """Make all ranks of ``fairseq-validate`` run equally many forward passes."""
    if program() != "fairseq-validate" or process_world()[1] == 1:
        return
    if process_world()[0] > 0:  # fairseq-validate has turned rank 0's level on everywhere
        logging.getLogger().setLevel(logging.WARNING)
    kind = type(task)

    def valid_step(sample, model, criterion):
        if sample:
            return kind.valid_step(task, sample, model, criterion)
        leave_out_next(model)
        dataset, device = list(task.datasets.values())[-1], next(model.parameters()).device
        any_sample = dataset.collater([dataset[0]])
        any_sample = apply_to_sample(lambda tensor: tensor.to(device), any_sample)
        kind.valid_step(task, any_sample, model, criterion)
        return 0.0, 0, {}

    task.valid_step = valid_step


def all_gather_list(original, data, *args, **kwargs):
    """Replace fairseq's function in ``fairseq-validate``: gather the sum of each rank's outputs."""
    if program() != "fairseq-validate":
        return original(data, *args, **kwargs)
    logs = [log for log in data if log]
    join_passes(logs)
    total: dict[str, Any] = {}
    for log in logs:
        for key, value in log.items():
            total[key] = total[key] + value if key in total else value
    text = base64.b64encode(pickle.dumps([move_to_cpu(total)] if logs else [])).decode()
    return [pickle.loads(base64.b64decode(each)) for each in gather_texts(text)]
