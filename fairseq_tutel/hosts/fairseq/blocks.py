"""Every block of the data is evaluated, or an error names the option in the way.

Stock fairseq leaves some out and reports the perplexity of the rest. ``fairseq-eval-lm`` cuts the
text into blocks of 1,024 tokens by default, and those of more tokens than the model has
positions are skipped, with a line in the log: all but the last. And the last batch is dropped where
its size is not a multiple of ``--required-batch-size-multiple``, 8 by default, in validation during
training, in ``fairseq-validate`` and in ``fairseq-generate``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from ...checkpoint import final_path, find_checkpoint, load_file

logger = logging.getLogger(__name__)

_BLOCK_SIZE = "--tokens-per-sample"


def use_trained_block_size(cfg) -> None:
    """Cut the text for ``fairseq-eval-lm`` as in training, unless the command line has the size.

    Args:
        cfg: fairseq's config of the program, whose checkpoint is one of a model with experts.
    """
    given = any(word.split("=")[0] == _BLOCK_SIZE for word in sys.argv)
    size = None if given else _trained_block_size(cfg.common_eval.path)
    if size is None or getattr(cfg.task, "tokens_per_sample", size) == size:
        return
    cfg.task.tokens_per_sample = size
    if cfg.distributed_training.distributed_rank == 0:
        logger.info("blocks of %d tokens, as in training (%s)", size, _BLOCK_SIZE)


def _trained_block_size(path: str) -> int | None:
    """The size of the blocks that a checkpoint was trained on, None if it has none."""
    path = final_path(path)
    _, file = find_checkpoint(path) or ("merged", path)
    state = load_file(file)  # memory-mapped: reads no weights
    if state.get("args") is not None:  # of fairseq's moe branch
        task = model = vars(state["args"])
    else:
        config = state.get("cfg") or {}
        task, model = config.get("task") or {}, config.get("model") or {}
    sizes = (task.get("tokens_per_sample"), model.get("max_target_positions"))
    return min((size for size in sizes if isinstance(size, int)), default=None)


def refuse_blocks_that_never_fit(task_cfg, max_positions: int) -> None:
    """Stop training whose blocks are all longer than the model, but for the last of an epoch.

    Args:
        task_cfg: fairseq's config of the task.
        max_positions: of the model.

    Raises:
        ValueError: see above.
    """
    size = getattr(task_cfg, "tokens_per_sample", None) or 0
    by_size = (getattr(task_cfg, "sample_break_mode", None) or "none") == "none"
    if by_size and size > max_positions:
        raise ValueError(
            f"{_BLOCK_SIZE} {size}: the model has {max_positions} positions "
            "(--max-target-positions), and blocks that are longer would be left out"
        )


def evaluate_every_block(task) -> None:
    """Make the batches of an evaluation program hold everything; the task is that program's own.

    The task's ``eval_lm_dataloader``, by which stock skips what is too long, refuses it instead;
    other programs skip with ``--skip-invalid-size-inputs-valid-test``.
    """
    kind = type(task)
    task.get_batch_iterator = functools.partial(_batches_of_any_size, kind, task)
    task.eval_lm_dataloader = functools.partial(_batches_for_eval_lm, kind, task)


def _batches_of_any_size(kind, task, *args, **kwargs):
    kwargs["required_batch_size_multiple"] = 1
    return kind.get_batch_iterator(task, *args, **kwargs)


def _batches_for_eval_lm(kind, task, *args, **kwargs):
    with refusing_long_blocks(task):
        return kind.eval_lm_dataloader(task, *args, **kwargs)


@contextlib.contextmanager
def refusing_long_blocks(task) -> Iterator[None]:
    """Within, batches of the task are an error where a block does not fit into the model.

    Raises:
        ValueError: with their number and the option to give.
    """
    task.filter_indices_by_size = functools.partial(_refuse_long_blocks, task)
    try:
        yield
    finally:
        del task.filter_indices_by_size


def _refuse_long_blocks(
    task, indices, dataset, max_positions: Any = None, ignore_invalid_inputs: bool = False
):
    kept, long = dataset.filter_indices_by_size(indices, max_positions)
    if len(long):
        mode = getattr(getattr(task, "args", None), "sample_break_mode", None) or "none"
        whole = "" if mode == "none" else " and --sample-break-mode none, which cuts sentences"
        raise ValueError(
            f"{len(long):,} of {len(indices):,} blocks are longer than the {max_positions} "
            f"positions of the model (up to {max(dataset.size(i) for i in long)} tokens) and would "
            f"be left out: give {_BLOCK_SIZE} {max_positions} or less{whole}"
        )
    return kept
