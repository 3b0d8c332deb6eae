"""Evaluates every block of the data, or raises an error that names the option in the way.

Stock ``fairseq-eval-lm`` skips blocks that are longer than the model's positions. Validation,
``fairseq-validate`` and ``fairseq-generate`` drop the last batch if its size is not a multiple of
``--required-batch-size-multiple`` (default 8).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from fairseq.data.iterators import ShardedIterator


def evaluate_every_block(task) -> None:
    """Make the batches of an evaluation program hold all data of its task."""
    kind = type(task)

    def batches_of_any_size(*args, **kwargs):
        kwargs["required_batch_size_multiple"] = 1
        return kind.get_batch_iterator(task, *args, **kwargs)

    def batches_for_eval_lm(*args, num_shards: int = 1, shard_id: int = 0, **kwargs):
        shards = {"num_shards": num_shards, "shard_id": shard_id}
        with refusing_long_blocks(task):
            if num_shards == 1 or not kwargs.get("context_window"):
                return kind.eval_lm_dataloader(task, *args, **shards, **kwargs)
            # a block's context is the block that was made before it: make all of them here, too
            batches = kind.eval_lm_dataloader(task, *args, **kwargs)
            return ShardedIterator(batches, **shards, fill_value={})

    task.get_batch_iterator = batches_of_any_size
    task.eval_lm_dataloader = batches_for_eval_lm


@contextlib.contextmanager
def refusing_long_blocks(task) -> Iterator[None]:
    """Raise ValueError within the context for blocks that are longer than the model's positions."""

    def refuse(indices, dataset, max_positions: Any = None, ignore_invalid_inputs: bool = False):
        if isinstance(max_positions, (tuple, list, dict)):  # sentence pairs, which stock refuses
            size = max_positions, ignore_invalid_inputs
            return type(task).filter_indices_by_size(task, indices, dataset, *size)
        kept, long = dataset.filter_indices_by_size(indices, max_positions)
        if not len(long):
            return kept
        mode = getattr(getattr(task, "args", None), "sample_break_mode", None) or "none"
        whole = "" if mode == "none" else " and --sample-break-mode none, which cuts sentences"
        raise ValueError(
            f"{len(long):,} of {len(indices):,} blocks are longer than the {max_positions} "
            f"positions of the model (up to {max(dataset.size(i) for i in long)} tokens) and would "
            f"be left out: give --tokens-per-sample {max_positions} or less{whole}"
        )

    task.filter_indices_by_size = refuse
    try:
        yield
    finally:
        del task.filter_indices_by_size
