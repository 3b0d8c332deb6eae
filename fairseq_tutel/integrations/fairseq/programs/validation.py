"""``fairseq-validate`` of a model with experts on several ranks, which share the data.

Stock passes over a rank's missing last batch, where other ranks' experts wait for it, and collects
logging outputs in a buffer of fixed size on a GPU.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from fairseq.utils import move_to_cpu

from ....distributed import gather_texts, process_world
from ..criterions.moe_criterion import join_passes
from . import program


def share_validation(task) -> None:
    """Let all ranks make as many passes; the task is that of the program."""
    if program() != "fairseq-validate" or process_world()[1] == 1:
        return
    kind = type(task)

    def valid_step(sample, model, criterion):
        if sample:
            return kind.valid_step(task, sample, model, criterion)
        kind.valid_step(task, _any_sample(task, model), model, criterion)
        return 0.0, 0, {}

    task.valid_step = valid_step


def _any_sample(task, model) -> dict[str, Any]:
    """One example of the data that is validated on, on the model's device."""
    dataset = list(task.datasets.values())[-1]
    sample = dataset.collater([dataset[0]])
    device = next(model.parameters()).device

    def moved(value):
        if torch.is_tensor(value):
            return value.to(device)
        return (
            {key: moved(each) for key, each in value.items()} if isinstance(value, dict) else value
        )

    return moved(sample)


def all_gather_list(original, data, *args, **kwargs):
    """In place of fairseq's function, in ``fairseq-validate``: every rank's logging outputs, summed
    on each but for the counts of its passes."""
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
