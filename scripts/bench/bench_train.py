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

import dataclasses
import sys
from collections.abc import Iterator

import models
import torch
from harness import Case, Goal, Point, free_memory, sweep
from layers import masks_have_no_room
from models import PRESETS, VARIANTS, Run
from predict import profile_of
from program import program, words
from record import ROOT

from fairseq_tutel.integrations.fairseq.options.benchmark import benchmark_of
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_traffic, count_work

_MAX_OVERFLOWS = 20
_OVER = "tokens/s of this plugin over it"
OPTIONS = {
    "preset": (str, "default: meta-1.1t-rank on a GPU, x4 on a CPU", PRESETS),
    "override": (words, "KEY=VALUE[,KEY=VALUE] of the preset's config, e.g. model.dropout=0.0"),
    "variants": (words, "default: the preset's", VARIANTS),
    "repetitions": None,  # updates
    "updates": (10, "measured updates of each variant"),
    "warmup": (2, "updates before those that count, at least 1"),
    "one-by-one": (False, "one variant after the other, for models that do not fit together"),
}


def case_of(variant, build, runs: dict[str, Run], samples, losses: list[float]) -> Case:
    """Return an update, repeated if its loss scale overflows; RuntimeError if it always does.

    The first update builds the model.
    """

    def forward(number):
        if variant not in runs:
            runs[variant] = build(variant)
        for _ in range(_MAX_OVERFLOWS):
            logged = runs[variant].update(samples[number % len(samples)])
            if "loss" in logged:
                losses.append(float(logged["loss"]))
                return (), ()
        raise RuntimeError(f"{_MAX_OVERFLOWS} updates in a row overflowed ({variant})")

    return Case(variant, forward)


def points(groups, config, skipped, goals, options, ranks) -> Iterator[Point]:
    """Yield the variants of each group, built when their turn comes and freed after it."""
    samples = models.random_samples(config, 4, options.seed + ranks.rank)
    tokens = ranks.world_size * config.dataset.batch_size * config.task.tokens_per_sample
    build_on = ranks.device if benchmark_of(config.model).simulate_world_size > 1 else None
    build = lambda variant: Run(variant, config, build_on)  # noqa: E731
    peak = peak_flops(config, ranks.device)
    speeds: dict[str, float] = {}
    for group in groups:
        runs: dict[str, Run] = {}
        losses: dict[str, list[float]] = {variant: [] for variant in group}
        cases = [case_of(each, build, runs, samples, losses[each]) for each in group]

        def derive(found, runs=runs):
            derived = {}
            for variant, ms in found["ms"].items():
                speed = speeds[variant] = 1e3 * tokens / ms["forward"]["p50"]
                columns = {"tokens/s": speed, "parameters": runs[variant].parameters}
                if variant != "moe" and "moe" in speeds:
                    columns[_OVER] = speeds["moe"] / speed
                if peak:
                    flops = model_flops(models.config_of(variant, config))
                    columns["MFU"] = flops * speed / (peak * ranks.world_size)
                if ranks.device.type == "cuda" and len(runs) == 1:
                    columns["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
                derived[variant] = columns
            return derived

        about = {"losses": losses, "tokens_per_update": tokens}
        yield Point("+".join(group), cases, about, skipped, derive, goals)
        skipped = {}  # said once
        runs.clear()
        free_memory(ranks.device)


def model_flops(config) -> float:
    """Return the operations per token, forward and backward, as the planner counts them."""
    settings = read_settings(config, "")
    counted = count_parameters(settings)
    return count_work(settings, counted, count_traffic(settings, counted)).model_flops


def peak_flops(config, device: torch.device) -> float | None:
    """Return the peak of a GPU in the config's precision; None for an unknown device."""
    profile = profile_of(device)
    half = config.common.fp16 or config.common.bf16
    return profile and load_hardware(ROOT / "configs", profile).flops(2 if half else 4)


@program(__doc__, OPTIONS)
def main(options, ranks):
    name = options.preset or ("meta-1.1t-rank" if ranks.device.type == "cuda" else "x4")
    preset = PRESETS[name]
    tiny = preset.tiny(ranks.world_size) if options.tiny else ()
    changes = [*tiny, *(options.override or ())]
    config = models.load_config(preset, changes, ranks)
    variants = options.variants or preset.variants.split()
    no_room = masks_have_no_room([models.layer_shape(config)], ranks.device)
    skipped = ranks.agree({"dense": no_room if "dense" in variants else None})
    variants = [variant for variant in variants if variant not in skipped]
    alone = options.one_by_one or preset.one_by_one
    groups = [[variant] for variant in variants] if alone else [variants]
    # tokens/s over other variants', and the share of the peak, of presets as they are
    goals = [Goal(variant, _OVER, bound) for variant, bound in preset.goals.items()]
    goals = [] if changes or ranks.world_size > 1 else [*goals, Goal("moe", "MFU", 0.50)]
    shown = f"tiny-{name}" if options.tiny else "custom" if changes else name
    about = {
        "preset": shown,
        "title": "; ".join([preset.about, *changes]),
        "settings": {
            **dataclasses.asdict(preset),
            "overrides": [*preset.changes(), *changes],
            "experts": config.model.moe_expert_count,
            "simulated_ranks": benchmark_of(config.model).simulate_world_size,
        },
    }
    found = points(groups, config, skipped, goals, options, ranks)
    how = {"repetitions": options.updates, "warmup": max(1, options.warmup), "clock": "wall"}
    file = f"train-{shown}-{ranks.device.type}"
    sweep("train", options, ranks, found, file=file, about=about, **how)


if __name__ == "__main__":
    sys.exit(main())
