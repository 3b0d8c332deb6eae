"""Ranges of the options of stock fairseq whose impossible values it accepts silently.

They are checked for models with experts only, in training and in evaluation; the options of this
package state their own (:mod:`fairseq_tutel.ranges`).
"""

from __future__ import annotations

from typing import Any

from ..ranges import FINITE, FRACTION, Range, at_least, check_ranges

POSITIVE = Range(0, low_open=True)
OFF_OR_COUNT = at_least(-1)  # -1 turns it off

# group of fairseq's config -> option -> range
STOCK_RANGES = {
    "common": {
        "log_interval": at_least(1),
        "seed": Range(0, 2**32 - 1),
        "fp16_init_scale": POSITIVE,
        "fp16_scale_window": at_least(1),
        "fp16_scale_tolerance": FRACTION,
        "min_loss_scale": at_least(0),  # 0: never gives up
        "threshold_loss_scale": at_least(0),
        "amp_batch_retries": at_least(0),
        "amp_init_scale": POSITIVE,
        "amp_scale_window": at_least(1),
        "empty_cache_freq": at_least(0),
        "all_gather_list_size": at_least(1),
        "model_parallel_size": Range(1, 1),
    },
    "distributed_training": {
        "distributed_world_size": at_least(1),
        "distributed_num_procs": at_least(0),  # fairseq 0.12.2: GPUs of the node
        "distributed_rank": at_least(0),
        "distributed_port": OFF_OR_COUNT,
        "device_id": at_least(0),
        "bucket_cap_mb": at_least(1),
        "heartbeat_timeout": OFF_OR_COUNT,
        "slowmo_momentum": FRACTION,
        "localsgd_frequency": at_least(1),
        "nprocs_per_node": at_least(1),
        "pipeline_chunks": at_least(0),
    },
    "task": {"tokens_per_sample": at_least(1)},
    "dataset": {
        "batch_size": at_least(1),
        "batch_size_valid": at_least(1),
        "max_tokens": at_least(1),
        "max_tokens_valid": at_least(1),
        "max_valid_steps": at_least(0),
        "num_workers": at_least(0),
        "data_buffer_size": at_least(0),
        "required_batch_size_multiple": at_least(1),
        "required_seq_len_multiple": at_least(1),
        "validate_interval": at_least(1),
        "validate_interval_updates": OFF_OR_COUNT,
        "validate_after_updates": at_least(0),
        "fixed_validation_seed": Range(0, 2**32 - 1),
        "curriculum": at_least(0),
        "num_shards": at_least(1),
        "shard_id": at_least(0),
    },
    "checkpoint": {
        "save_interval": at_least(1),
        "save_interval_updates": OFF_OR_COUNT,
        "keep_interval_updates": OFF_OR_COUNT,
        "keep_interval_updates_pattern": OFF_OR_COUNT,
        "keep_last_epochs": OFF_OR_COUNT,
        "keep_best_checkpoints": OFF_OR_COUNT,
        "patience": OFF_OR_COUNT,
        "checkpoint_shard_count": at_least(1),
        "model_parallel_size": Range(1, 1),
    },
    "model": {
        "activation_dropout": FRACTION,
        "relu_dropout": FRACTION,
        "decoder_layerdrop": FRACTION,
        "max_target_positions": at_least(1),
        "adaptive_softmax_cutoff": at_least(1),
        "adaptive_softmax_dropout": FRACTION,
        "adaptive_softmax_factor": POSITIVE,
        "adaptive_input_cutoff": at_least(1),
        "adaptive_input_factor": POSITIVE,
        "character_embedding_dim": at_least(1),
        "char_embedder_highway_layers": at_least(0),
        "quant_noise_pq": FRACTION,
        "quant_noise_pq_block_size": at_least(1),
        "quant_noise_scalar": FRACTION,
        "min_params_to_wrap": at_least(0),
        "base_layers": at_least(0),
        "base_sublayers": at_least(1),
        "base_shuffle": at_least(0),
    },
    "optimization": {
        "max_epoch": at_least(0),
        "max_update": at_least(0),
        "stop_time_hours": at_least(0),
        "lr": at_least(0),
        "stop_min_lr": OFF_OR_COUNT,
        "clip_norm": OFF_OR_COUNT,
        "update_freq": at_least(1),
    },
    "lr_scheduler": {"warmup_updates": at_least(0), "warmup_init_lr": OFF_OR_COUNT},
    "optimizer": {
        "adam_betas": Range(0, 1, high_open=True),
        "adam_eps": POSITIVE,
        "weight_decay": at_least(0),
    },
    "ema": {
        "ema_decay": FRACTION,
        "ema_start_update": at_least(0),
        "ema_update_freq": at_least(1),
    },
    "eval_lm": {"context_window": at_least(0), "softmax_batch": at_least(0)},
    "interactive": {"buffer_size": at_least(0)},
    "generation": {
        "beam": at_least(1),
        "nbest": at_least(1),
        "max_len_a": at_least(0),
        "max_len_b": FINITE,  # of max_len_a * length + max_len_b
        "min_len": at_least(0),
        "lenpen": FINITE,
        "unkpen": FINITE,
        "prefix_size": at_least(0),
        "no_repeat_ngram_size": at_least(0),
        "sampling_topk": OFF_OR_COUNT,
        "sampling_topp": Range(-1, 1),
        "temperature": POSITIVE,
        "diverse_beam_groups": OFF_OR_COUNT,
        "diverse_beam_strength": FINITE,
        "diversity_rate": OFF_OR_COUNT,
        "lm_weight": FINITE,
        "iter_decode_eos_penalty": FINITE,
        "iter_decode_max_iter": at_least(0),
        "iter_decode_with_beam": at_least(1),
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
