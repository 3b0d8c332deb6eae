"""Tokens per second of fairseq training, end to end, beside dense models.

    python scripts/bench/bench_train.py --preset x4
    python scripts/bench/bench_train.py --preset translation --updates 4 --warmup 1
    python scripts/bench/bench_train.py --device cuda --preset meta-1.1t-rank
    python -m fairseq_tutel.launch -- python scripts/bench/bench_train.py --preset meta-1.1t-rank

Variants take turns: this plugin; the same model with the dense S x E x C formulation; the
FLOP-matched dense model, whose feed-forward networks are K times as wide. An update is fairseq's
``Trainer.train_step``: forward, backward, clipping, optimizer, statistics. On several ranks the
tokens of all ranks count, and the time of the slowest.

Good: at least 0.90 of the FLOP-matched model's tokens/s, and on a GPU half of its peak.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import models
import torch
from harness import Case, Goal, Point, free_memory, sweep
from layers import masks_have_no_room
from models import PRESETS, VARIANTS, Run, TrainPreset
from program import Ranks, program, words
from record import ROOT

from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_traffic, count_work

_MAX_OVERFLOWS = 20
_OVER = "tokens/s of this plugin over it"
_PROFILES = {"H200": "h200", "H100": "h100", "A100": "a100-80g"}  # by a part of the GPU's name
OPTIONS = {
    "preset": (str, "default: meta-1.1t-rank on a GPU, x4 on a CPU"),
    "override": (words, "KEY=VALUE[,KEY=VALUE] of the preset's config, e.g. model.dropout=0.0"),
    "variants": (words, "default: the preset's", VARIANTS),
    "repetitions": None,  # updates
    "updates": (10, "measured updates of each variant"),
    "warmup": (2, "updates before those that count"),
    "one-by-one": (False, "one variant after the other, for models that do not fit together"),
}


def case_of(run: Run, samples: Sequence[dict], losses: list[float]) -> Case:
    """Return an update, repeated if its loss scale overflows; RuntimeError if it always does."""

    def forward(number):
        for _ in range(_MAX_OVERFLOWS):
            logged = run.update(samples[number % len(samples)])
            if "loss" in logged:
                losses.append(float(logged["loss"]))
                return (), ()
        raise RuntimeError(f"{_MAX_OVERFLOWS} updates in a row overflowed ({run.variant})")

    return Case(run.variant, forward)


def points(
    groups: Sequence[Sequence[str]],
    config,
    goals: Sequence[Goal],
    options: argparse.Namespace,
    ranks: Ranks,
) -> Iterator[Point]:
    """Yield the variants of each group, built when their turn comes and freed after it."""
    on_gpu = ranks.device.type == "cuda"
    samples = models.random_samples(config, 4, options.seed + ranks.rank)
    tokens = ranks.world_size * config.dataset.batch_size * config.task.tokens_per_sample
    build_on = ranks.device if config.model.moe_simulate_world_size > 1 else None
    peak = peak_flops(config, ranks.device)
    speeds: dict[str, float] = {}
    for group in groups:
        runs: dict[str, Run] = {}
        losses: dict[str, list[float]] = {variant: [] for variant in group}
        point = Point("+".join(group), [], {"losses": losses, "tokens_per_update": tokens})
        try:
            for variant in group:
                runs[variant] = Run(variant, config, build_on)
                point.cases.append(case_of(runs[variant], samples, losses[variant]))
        except torch.cuda.OutOfMemoryError:
            if ranks.world_size > 1:  # the others wait for this one
                raise
            point.cases.clear()
            point.not_run |= dict.fromkeys(group, "it ran out of memory on this GPU")
        if on_gpu:  # of training, not of building in fp32
            torch.cuda.reset_peak_memory_stats()

        def derive(found, runs=runs):
            derived: dict[str, dict[str, Any]] = {}
            speeds.update(
                {name: 1e3 * tokens / ms["forward"]["p50"] for name, ms in found["ms"].items()}
            )
            for variant in found["ms"]:
                columns = {"tokens/s": speeds[variant], "parameters": runs[variant].parameters}
                if variant != "moe" and "moe" in speeds:
                    columns[_OVER] = speeds["moe"] / speeds[variant]
                if peak:
                    flops = model_flops(models.config_of(variant, config))
                    columns["MFU"] = flops * speeds[variant] / (peak * ranks.world_size)
                if on_gpu and len(runs) == 1:
                    columns["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
                derived[variant] = columns
            return derived

        point.derive, point.goals = derive, goals
        yield point
        runs.clear()
        free_memory(ranks.device)


def goals_of(preset: TrainPreset) -> list[Goal]:
    """Return the goals of a preset: tokens/s over other variants', and the share of the peak."""
    found = [Goal(name, _OVER, bound) for name, bound in preset.goals.items()]
    return [*found, Goal("moe", "MFU", 0.50)]


def model_flops(config) -> float:
    """Return the operations per token, forward and backward, as the planner counts them."""
    settings = read_settings(config, "")
    counted = count_parameters(settings)
    return count_work(settings, counted, count_traffic(settings, counted)).model_flops


def peak_flops(config, device: torch.device) -> float | None:
    """Return the peak of a GPU in the config's precision; None for an unknown device."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = next((profile for part, profile in _PROFILES.items() if part in gpu), None)
    if name is None:
        return None
    half = config.common.fp16 or config.common.bf16
    return load_hardware(ROOT / "configs", name).flops(2 if half else 4)


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    name = options.preset or ("meta-1.1t-rank" if ranks.device.type == "cuda" else "x4")
    preset = PRESETS[name]
    tiny = preset.tiny(ranks.world_size) if options.tiny else ()
    changes = [*tiny, *(options.override or ())]
    config = models.load_config(preset, changes, ranks)
    variants = options.variants or preset.variants.split()
    shape = models.layer_shape(config)
    reasons = {"dense": masks_have_no_room([shape], ranks.device)} if "dense" in variants else {}
    skipped = ranks.agree(reasons)
    variants = [variant for variant in variants if variant not in skipped]
    alone = options.one_by_one or preset.one_by_one
    groups = [[variant] for variant in variants] if alone else [variants]
    # goals are of the preset as it is
    goals = [] if changes or ranks.world_size > 1 else goals_of(preset)
    shown = f"tiny-{name}" if options.tiny else "custom" if changes else name
    about = {
        "preset": shown,
        "title": "; ".join([preset.about, *changes]),
        "settings": {
            **dataclasses.asdict(preset),
            "overrides": [*preset.changes(), *changes],
            "experts": config.model.moe_expert_count,
            "simulated_ranks": config.model.moe_simulate_world_size,
        },
        "not_run": skipped,
    }
    how = {"repetitions": options.updates, "warmup": options.warmup, "clock": "wall"}
    # write after each update: the next one, or the next variant, may be one too many
    how |= {"file": f"train-{shown}-{ranks.device.type}", "about": about, "seconds_between": 0}
    sweep("train", options, ranks, points(groups, config, goals, options, ranks), **how)


main = program(__doc__, OPTIONS, run, PRESETS)


if __name__ == "__main__":
    sys.exit(main())
