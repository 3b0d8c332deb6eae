"""Ranges of the options of stock fairseq whose impossible values it takes without a word.

They are checked for models with experts only; the options of this package state their own
(:mod:`fairseq_tutel.ranges`).
"""

from __future__ import annotations

from typing import Any

from ..ranges import FRACTION, Range, at_least, check_ranges

# group of fairseq's config -> option -> range
STOCK_RANGES = {
    "common": {"log_interval": at_least(1)},
    "task": {"tokens_per_sample": at_least(1)},
    "dataset": {
        "batch_size": at_least(1),
        "batch_size_valid": at_least(1),
        "max_tokens": at_least(1),
        "max_tokens_valid": at_least(1),
        "num_workers": at_least(0),
        "required_batch_size_multiple": at_least(1),
        "validate_interval": at_least(1),
        "validate_interval_updates": at_least(0),
    },
    "checkpoint": {"save_interval": at_least(1), "save_interval_updates": at_least(0)},
    "model": {
        "activation_dropout": FRACTION,
        "relu_dropout": FRACTION,
        "decoder_layerdrop": FRACTION,
        "max_target_positions": at_least(1),
    },
    "optimization": {"lr": at_least(0), "clip_norm": at_least(0), "update_freq": at_least(1)},
    "lr_scheduler": {"warmup_updates": at_least(0)},
    "optimizer": {
        "adam_betas": Range(0, 1, high_open=True),
        "adam_eps": at_least(0),
        "weight_decay": at_least(0),
    },
}


def check_stock_ranges(options: Any) -> None:
    """Hold fairseq's options, a parsed command line or a whole config, against their ranges.

    Raises:
        ValueError: one line about those of the first group that has a wrong one.
    """
    for group, ranges in STOCK_RANGES.items():
        check_ranges(options, ranges)
        check_ranges(getattr(options, group, None), ranges)
