"""Tokens per second of fairseq training, end to end: this plugin and what it is compared with.

    python scripts/bench/bench_train.py --preset x4
    python scripts/bench/bench_train.py --device cuda --preset meta-1.1t-rank
    python -m fairseq_tutel.launch -- python scripts/bench/bench_train.py --preset meta-1.1t-rank

In one run and in turn: this plugin; the same model whose MoE layers compute the dense S x E x C
formulation; the FLOP-matched dense model, whose MoE layers are dense feed-forward networks K times
as wide. An update is fairseq's ``Trainer.train_step``: forward, backward, clipping, optimizer,
statistics. On several ranks (third line) the tokens of all ranks count, and the time of the
slowest.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from measure import free_memory, percentiles
from ranks import Ranks
from record import ROOT, device_name, goal, say, table
from runner import Report, command_line, expect_known, words
from train_models import (
    PRESETS,  # fmt: skip
    VARIANTS,
    Run,
    TrainPreset,
    dense_masks,
    flop_matched,
    load_config,
    random_samples,
    tiny_overrides,
)

from fairseq_tutel.moe.memory import free_memory as available_memory
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_traffic, count_work

_MAX_OVERFLOWS = 20
_MFU_GOAL = 0.50
# Hardware profile by a part of the GPU's name.
_PROFILES = {"H200": "h200", "H100": "h100", "A100": "a100-80g"}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PRESETS)
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="default: meta-1.1t-rank on a GPU, x4 on a CPU")
    of_config = "of the preset's config, e.g. model.dropout=0.0; may be repeated"
    add("--override", action="append", default=[], metavar="KEY=VALUE", help=of_config)
    add("--variants", help=f"of {', '.join(VARIANTS)} (default: the preset's)", **words())
    add("--updates", type=int, default=10, help="measured updates of each variant (default: 10)")
    add("--warmup", type=int, default=2, help="updates before those that count (default: 2)")
    alone = "measure one variant after the other (default where models do not fit together)"
    add("--one-by-one", action="store_true", help=alone)
    add("--output", type=Path, help="JSON file (default: runs/bench/train-PRESET-DEVICE.json)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.updates, options.warmup = 2, 1
    return options


def timed_update(run: Run, sample: dict, ranks: Ranks) -> tuple[float, float]:
    """(seconds, loss) of an update that was made; those with an overflow do not count.

    Raises:
        RuntimeError: the loss scale does not come to rest.
    """
    for _ in range(_MAX_OVERFLOWS):
        ranks.wait()
        begin = time.perf_counter()
        logged = run.update(sample)
        ranks.wait()
        seconds = time.perf_counter() - begin
        if "loss" in logged:
            return seconds, float(logged["loss"])
    raise RuntimeError(f"{_MAX_OVERFLOWS} updates in a row overflowed ({run.variant})")


def measure_together(runs: Sequence[Run], samples, options, ranks: Ranks) -> Iterator[dict]:
    """Updates of all runs in turn, each repetition beginning with another run.

    Yields:
        variant -> seconds, losses, parameters, and the peak memory of a process that holds this
        variant alone, after each repetition that counts.
    """
    found = {
        run.variant: {"seconds": [], "losses": [], "parameters": run.parameters} for run in runs
    }
    if ranks.device.type == "cuda":  # of training, not of building in fp32
        torch.cuda.reset_peak_memory_stats()
    for number in range(-options.warmup, options.updates):
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            taken, loss = timed_update(run, samples[number % len(samples)], ranks)
            of = found[run.variant]
            of["losses"].append(loss)
            if number >= 0:
                of["seconds"].append(taken)
            if ranks.device.type == "cuda" and len(runs) == 1:
                of["peak_bytes_of_process"] = torch.cuda.max_memory_allocated()
        if number >= 0:
            yield found


def measure(
    groups: Sequence[Sequence[str]], config, samples, options, ranks: Ranks, skipped: dict[str, str]
) -> Iterator[dict[str, dict]]:
    """Measure the variants of each group in turn; yields what is known, ever more.

    Args:
        skipped: gets the variants that are found not to fit.

    Yields:
        as :func:`measure_together`, of all groups so far; on several ranks after each group only.
    """
    build_on = ranks.device if config.model.moe_simulate_world_size > 1 else None
    measured: dict[str, dict] = {}
    for group in groups:
        runs: list[Run] = []
        found: dict[str, dict] = {}
        try:
            for variant in group:
                runs.append(Run(variant, config, build_on))
            for found in measure_together(runs, samples, options, ranks):
                if ranks.world_size == 1:
                    yield {**measured, **found}
        except torch.cuda.OutOfMemoryError:
            if ranks.world_size > 1:  # the others wait for this one
                raise
            skipped.update((v, "it ran out of memory on this GPU") for v in set(group) - set(found))
        for raw in found.values():
            raw["seconds"] = ranks.slowest(raw["seconds"])
        for run in runs:
            run.close()
        runs.clear()
        run = None  # noqa: F841 (the last one's weights)
        free_memory(ranks.device)
        measured.update(found)
        yield measured


def drop_dense(variants: list[str], config, ranks: Ranks) -> dict[str, str]:
    """Take ``dense`` out where its masks do not fit on some rank; name -> reason."""
    need, free = dense_masks(config), available_memory(ranks.device)
    too_big = bool(ranks.slowest([float(need > free)])[0])  # on every rank or none
    if not too_big or "dense" not in variants:
        return {}
    variants.remove("dense")
    needs = f"the masks of one layer alone need {need / 1e9:.1f} GB (computed)"
    return {"dense": f"{needs}, {free / 1e9:.1f} GB are available"}


def summarise(measured: dict[str, dict], tokens: int, flops: dict[str, float], peak: float | None):
    """Results by variant from raw seconds."""
    results = {}
    for variant, raw in measured.items():
        spread = percentiles(raw["seconds"])
        speed = {key: tokens / value for key, value in spread.items()}
        results[variant] = {
            "about": VARIANTS[variant],
            "parameters": raw["parameters"],
            "seconds": spread,
            "tokens_per_second": speed,
            "model_flops_per_token": flops[variant],
            "model_flops_utilisation": peak and flops[variant] * speed["p50"] / peak,
            "peak_bytes_of_process": raw.get("peak_bytes_of_process"),
            "losses": raw["losses"],
            "raw_seconds": raw["seconds"],
        }
    return results


def model_flops(config) -> float:
    """Operations per token, forward and backward, as the planner counts them."""
    settings = read_settings(config, "")
    counted = count_parameters(settings)
    return count_work(settings, counted, count_traffic(settings, counted)).model_flops


def peak_flops(config, device: torch.device) -> float | None:
    """Of a GPU in the config's precision, from its profile; None for an unknown device."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = next((profile for part, profile in _PROFILES.items() if part in gpu), None)
    if name is None:
        return None
    hardware = load_hardware(ROOT / "configs" / "hardware", name)
    half = config.common.fp16 or config.common.bf16
    return hardware.half_flops if half else hardware.fp32_flops


def compare(results: dict[str, Any], preset: TrainPreset) -> tuple[dict[str, float], list[dict]]:
    """Ratios of this plugin's median tokens/s to the others', and the goals."""
    if "moe" not in results:
        return {}, []
    speed = {name: run["tokens_per_second"]["p50"] for name, run in results.items()}
    ratios = {f"moe/{name}": speed["moe"] / speed[name] for name in results if name != "moe"}
    goals = [
        goal(f"at least {bound:g} times the tokens/s of: {VARIANTS[n]}", ratios[f"moe/{n}"], bound)
        for n, bound in preset.goals
        if n in results
    ]
    used = results["moe"]["model_flops_utilisation"]
    if used is not None:
        goals.append(goal(f"model FLOPs utilisation of at least {_MFU_GOAL:.0%}", used, _MFU_GOAL))
    return ratios, goals


def print_result(result: dict[str, Any]) -> None:
    """Table, ratios and goals."""
    say(f"training on {device_name(result)}, {result['world_size']} rank(s): {result['title']}")
    if result["settings"]["simulated_ranks"]:
        say(f"SIMULATED rank of {result['settings']['simulated_ranks']}: each all-to-all is a copy")
    rows = []
    for name, run in result["results"].items():
        peak, used = run["peak_bytes_of_process"], run["model_flops_utilisation"]
        peak = "-" if peak is None else f"{peak / 2**30:.1f}"
        used = "-" if used is None else f"{used:.1%}"
        rows.append({**run, "name": name, "peak": peak, "used": used})
    shown = {
        "variant": "{name}",
        "parameters": "{parameters:,}",
        "s/update": "{seconds[p50]:.3f}",
        "tokens/s: p50": "{tokens_per_second[p50]:,.0f}",
        "p20-p80": "{tokens_per_second[p80]:,.0f}-{tokens_per_second[p20]:,.0f}",
        "peak GiB": "{peak}",
        "MFU": "{used}",
    }
    say(table(rows, shown))
    for key, ratio in result["ratios"].items():
        say(f"tokens/s, {key}: {ratio:.2f}")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    device = ranks.device
    name = options.preset or ("meta-1.1t-rank" if device.type == "cuda" else "x4")
    preset = PRESETS[name]
    tiny = tiny_overrides(preset, ranks.world_size) if options.tiny else ()
    changes = [*tiny, *options.override]
    config = load_config(preset, changes, ranks)
    variants = list(options.variants or preset.variants)
    expect_known("--variants", variants, list(VARIANTS))
    skipped = drop_dense(variants, config, ranks)
    alone = options.one_by_one or preset.one_by_one
    groups = [[v] for v in variants] if alone else [variants]
    samples = random_samples(config, config.task.dict_size + 4, 4, options.seed + ranks.rank)
    tokens = ranks.world_size * config.dataset.batch_size * config.task.tokens_per_sample
    peak = peak_flops(config, device)
    configs = {v: flop_matched(config) if v == "flop-matched" else config for v in variants}
    flops = {variant: model_flops(each) for variant, each in configs.items()}
    shown = f"tiny-{name}" if options.tiny else "custom" if changes else name
    report = Report(
        "train",
        ranks,
        options.output or Path(f"runs/bench/train-{shown}-{device.type}.json"),
        preset=shown,
        title="; ".join([preset.about, *changes]),
        settings={
            **dataclasses.asdict(preset),
            "overrides": [*preset.overrides, *changes],
            "tokens_per_update": tokens,
            "experts": config.model.moe_expert_count,
            "simulated_ranks": config.model.moe_simulate_world_size,
            "interleaved": len(groups) == 1,
        },
    )
    report.seconds_between = 0  # the next update or variant may be one too many
    goals_hold = not changes and ranks.world_size == 1  # they are of the preset as it is
    for measured in measure(groups, config, samples, options, ranks, skipped):
        results = summarise(measured, tokens, flops, peak and peak * ranks.world_size)
        ratios, goals = compare(results, preset)
        whole = {
            "not_run": skipped,
            "results": results,
            "ratios": ratios,
            "goals": goals if goals_hold else [],
        }
        report.keep(whole.copy)
    report.finish(whole, print_result)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
