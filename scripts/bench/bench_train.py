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

import torch
from dense_reference import masks_have_no_room
from harness import Case, Point, free_memory, sweep
from models import (
    PRESETS,
    VARIANTS,
    Run,
    TrainPreset,
    config_of,
    layer_shape,
    load_config,
    random_samples,
)
from program import Ranks, Report, expect_known, goal, preset_of, program, words
from record import ROOT

from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_traffic, count_work

_MAX_OVERFLOWS = 20
_MFU_GOAL = 0.50
_PROFILES = {"H200": "h200", "H100": "h100", "A100": "a100-80g"}  # by a part of the GPU's name
OPTIONS = {
    "preset": (str, "default: meta-1.1t-rank on a GPU, x4 on a CPU"),
    "override": (words, "KEY=VALUE[,KEY=VALUE] of the preset's config, e.g. model.dropout=0.0"),
    "variants": (words, f"of {', '.join(VARIANTS)} (default: the preset's)"),
    "updates": (10, "measured updates of each variant"),
    "warmup": (2, "updates before those that count"),
    "one-by-one": (False, "one variant after the other, for models that do not fit together"),
}


def case_of(run: Run, samples: Sequence[dict], losses: list[float]) -> Case:
    """An update, repeated if its loss scale overflows; RuntimeError if it always does."""

    def forward(number):
        for _ in range(_MAX_OVERFLOWS):
            logged = run.update(samples[number % len(samples)])
            if "loss" in logged:
                losses.append(float(logged["loss"]))
                return (), ()
        raise RuntimeError(f"{_MAX_OVERFLOWS} updates in a row overflowed ({run.variant})")

    return Case(run.variant, forward)


def points(
    groups: Sequence[Sequence[str]], config, options: argparse.Namespace, ranks: Ranks
) -> Iterator[Point]:
    """The variants of each group, built when their turn comes and freed after it."""
    samples = random_samples(config, 4, options.seed + ranks.rank)
    tokens = ranks.world_size * config.dataset.batch_size * config.task.tokens_per_sample
    build_on = ranks.device if config.model.moe_simulate_world_size > 1 else None
    peak = peak_flops(config, ranks.device)
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
        if ranks.device.type == "cuda":  # of training, not of building in fp32
            torch.cuda.reset_peak_memory_stats()

        def derive(found, runs=runs):
            derived: dict[str, dict[str, Any]] = {}
            for variant, ms in found["ms"].items():
                speed = 1e3 * tokens / ms["forward"]["p50"]
                columns = {"tokens/s": speed, "parameters": runs[variant].parameters}
                if peak:
                    flops = model_flops(config_of(variant, config))
                    columns["MFU"] = flops * speed / (peak * ranks.world_size)
                if ranks.device.type == "cuda" and len(runs) == 1:
                    columns["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
                derived[variant] = columns
            return derived

        point.derive = derive
        yield point
        runs.clear()
        free_memory(ranks.device)


def drop_dense(variants: list[str], config, ranks: Ranks) -> dict[str, str]:
    """Remove ``dense`` if its masks do not fit on some rank; name -> reason."""
    reason = masks_have_no_room([layer_shape(config)], ranks.device)
    anywhere = bool(ranks.slowest([float(reason is not None)])[0])  # on every rank or none
    if not anywhere or "dense" not in variants:
        return {}
    variants.remove("dense")
    return {"dense": reason or "another rank has no room for its masks"}


def model_flops(config) -> float:
    """Operations per token, forward and backward, as the planner counts them."""
    settings = read_settings(config, "")
    counted = count_parameters(settings)
    return count_work(settings, counted, count_traffic(settings, counted)).model_flops


def peak_flops(config, device: torch.device) -> float | None:
    """Peak of a GPU in the config's precision, from its profile; None for an unknown device."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = next((profile for part, profile in _PROFILES.items() if part in gpu), None)
    if name is None:
        return None
    half = config.common.fp16 or config.common.bf16
    return load_hardware(ROOT / "configs", name).flops(2 if half else 4)


def goals_of(preset: TrainPreset, results: dict[str, Any]) -> list[dict]:
    """Goals of a preset: tokens/s over those of other variants, and the share of the peak."""
    derived = {name: of for point in results.values() for name, of in point["derived"].items()}
    mine = derived.pop("moe", {})
    goals = [
        goal(
            f"at least {bound:g} times the tokens/s of: {VARIANTS[name]}",
            *(mine["tokens/s"] / derived[name]["tokens/s"], bound),
        )
        for name, bound in preset.goals.items()
        if mine and name in derived
    ]
    if "MFU" in mine:
        text = f"model FLOPs utilisation of at least {_MFU_GOAL:.0%}"
        goals.append(goal(text, mine["MFU"], _MFU_GOAL))
    return goals


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    name = preset_of(options, ranks, "meta-1.1t-rank", "x4", PRESETS)
    preset = PRESETS[name]
    if options.tiny:
        options.updates, options.warmup = 2, 1
    tiny = preset.tiny(ranks.world_size) if options.tiny else ()
    changes = [*tiny, *(options.override or ())]
    config = load_config(preset, changes, ranks)
    variants = list(options.variants or preset.variants.split())
    expect_known("--variants", variants, list(VARIANTS))
    skipped = drop_dense(variants, config, ranks)
    alone = options.one_by_one or preset.one_by_one
    groups = [[variant] for variant in variants] if alone else [variants]
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
    # they are of the preset as it is
    hold = not changes and ranks.world_size == 1
    how: dict[str, Any] = {"warmup": options.warmup, "clock": "wall"}
    how["goals"] = lambda results: goals_of(preset, results) if hold else []
    default = f"train-{shown}-{ranks.device.type}"
    with Report("train", ranks, options.output, default, **about) as report:
        report.seconds_between = 0  # the next update or variant may be one too many
        sweep(report, points(groups, config, options, ranks), ranks, options.updates, **how)


main = program(__doc__, OPTIONS, run, PRESETS)


if __name__ == "__main__":
    sys.exit(main())
