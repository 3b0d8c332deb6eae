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

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from measure import available_memory, free_memory
from ranks import Ranks, choose_device, connected
from record import Journal, OtherLoad, describe_run, quiet_logs, say, write_json
from train_models import (
    PRESETS,
    VARIANTS,
    Run,
    TrainPreset,
    dense_masks,
    load_config,
    random_samples,
    tiny_overrides,
)
from train_results import compare, model_flops, peak_flops, print_result, summarise

_MAX_OVERFLOWS = 20


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    about = "\n".join(f"  {name:15s} {preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=f"presets:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--preset", choices=list(PRESETS), help="default: meta-1.1t-rank on a GPU, x4 on a CPU")
    add(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the preset's config, e.g. model.dropout=0.0; may be repeated",
    )
    add("--tiny", action="store_true", help="rehearsal: sizes and repetitions cut down")
    add(
        "--variants",
        type=lambda text: text.split(","),
        metavar="LIST",
        help=f"of {', '.join(VARIANTS)} (default: the preset's)",
    )
    add("--updates", type=int, default=10, help="measured updates of each variant (default: 10)")
    add("--warmup", type=int, default=2, help="updates before those that count (default: 2)")
    add(
        "--one-by-one",
        action="store_true",
        help="measure one variant after the other instead of in turn (default for presets whose "
        "models do not fit together)",
    )
    add(
        "--hardware",
        help="profile in configs/hardware for the model FLOPs utilisation (default: "
        "by the GPU's name)",
    )
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--seed", type=int, default=1, help="of the tokens (default: 1)")
    add("--output", type=Path, help="JSON file (default: runs/bench/train-PRESET-DEVICE.json)")
    add("--figure", type=Path, help="PNG file (default: beside the JSON file)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.updates, options.warmup = 2, 1
    return options


class Stopwatch:
    """Seconds of one update of a run, its device included."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def _wait(self):
        self._ranks.barrier()
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def time(self, run: Run, sample: dict) -> tuple[float, float]:
        """(seconds, loss) of an update that was made; those with an overflow do not count.

        Raises:
            RuntimeError: the loss scale does not come to rest.
        """
        for _ in range(_MAX_OVERFLOWS):
            self._wait()
            begin = time.perf_counter()
            logged = run.update(sample)
            self._wait()
            seconds = time.perf_counter() - begin
            if "loss" in logged:
                return seconds, float(logged["loss"])
        raise RuntimeError(f"{_MAX_OVERFLOWS} updates in a row overflowed ({run.variant})")


def measure_together(
    runs: Sequence[Run], samples, options, watch: Stopwatch
) -> Iterator[dict[str, dict]]:
    """Updates of all runs in turn, each repetition beginning with another run.

    Yields:
        variant -> seconds and losses so far, after each repetition that counts.
    """
    found = {run.variant: {"seconds": [], "losses": []} for run in runs}
    for number in range(-options.warmup, options.updates):
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            taken, loss = watch.time(run, samples[number % len(samples)])
            if number >= 0:
                found[run.variant]["seconds"].append(taken)
            found[run.variant]["losses"].append(loss)
        if number >= 0:
            yield found


def measure(
    groups: Sequence[Sequence[str]], config, samples, options, ranks: Ranks, skipped: dict[str, str]
) -> Iterator[dict[str, dict]]:
    """Measure the variants of each group in turn; yields what is known, ever more.

    Args:
        skipped: gets the variants that are found not to fit.

    Yields:
        variant -> seconds and losses of every update, parameters, and the peak memory of the
        process where it held this variant alone. On several ranks after each group only.
    """
    device, watch = ranks.device, Stopwatch(ranks)
    build_on = device if config.model.moe_simulate_world_size > 1 else None
    measured: dict[str, dict] = {}
    for group in groups:
        runs: list[Run] = []
        found: dict[str, dict] = {}
        try:
            for variant in group:
                runs.append(Run(variant, config, build_on))
            if device.type == "cuda":  # of training, not of building in fp32
                torch.cuda.reset_peak_memory_stats()
            for found in measure_together(runs, samples, options, watch):
                _complete(found, runs, device)
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
        free_memory(device)
        measured.update(found)
        yield measured


def _complete(found: dict[str, dict], runs: Sequence[Run], device: torch.device) -> None:
    """Add what is not measured by the clock."""
    for run in runs:
        found[run.variant]["parameters"] = run.parameters
        if device.type == "cuda" and len(runs) == 1:
            found[run.variant]["peak_bytes_of_process"] = torch.cuda.max_memory_allocated()


def choose_variants(options, preset: TrainPreset, config, ranks: Ranks):
    """Groups of variants that are measured together, and name -> reason of those left out.

    Raises:
        ValueError: an unknown name.
    """
    variants = list(options.variants or preset.variants)
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants {','.join(unknown)}: choose from {', '.join(VARIANTS)}")
    need, free = dense_masks(config), available_memory(ranks.device)
    # on every rank or none
    too_big = bool(ranks.slowest([float(need > free)])[0])
    skipped = {}
    if "dense" in variants and too_big:
        variants.remove("dense")
        skipped["dense"] = (
            f"the masks of one layer alone need {need / 1e9:.1f} GB (computed), {free / 1e9:.1f} "
            "GB are available"
        )
    alone = options.one_by_one or preset.one_by_one
    return ([[v] for v in variants] if alone else [variants]), skipped


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write."""
    device = ranks.device
    name = options.preset or ("meta-1.1t-rank" if device.type == "cuda" else "x4")
    preset = PRESETS[name]
    changes = [*(tiny_overrides(preset) if options.tiny else ()), *options.override]
    config = load_config(preset, changes, ranks)
    groups, skipped = choose_variants(options, preset, config, ranks)
    samples = random_samples(config, config.task.dict_size + 4, 4, options.seed + ranks.rank)
    tokens = ranks.world_size * config.dataset.batch_size * config.task.tokens_per_sample
    others = OtherLoad()
    peak = peak_flops(options.hardware, config, device)
    flops = model_flops([v for group in groups for v in group], config)
    result = {
        **describe_run("train", device, ranks.world_size),
        "preset": f"tiny-{name}" if options.tiny else "custom" if changes else name,
        "title": "; ".join([preset.about, *changes]),
        "settings": {
            **dataclasses.asdict(preset),
            "overrides": [*preset.overrides, *changes],
            "tokens_per_update": tokens,
            "experts": config.model.moe_expert_count,
            "simulated_ranks": config.model.moe_simulate_world_size,
            "interleaved": len(groups) == 1,
        },
        "not_run": skipped,
    }
    as_given = not changes and ranks.world_size == 1
    journal = Journal(output_path(options, result) if ranks.first else None, seconds=0)
    for measured in measure(groups, config, samples, options, ranks, skipped):
        results = summarise(measured, tokens, flops, peak and peak * ranks.world_size)
        ratios, goals = compare(results, preset)
        result |= {
            "cpu_share_of_others": others.share(),
            "results": results,
            "ratios": ratios,
            "goals": goals if as_given else [],  # they hold for the preset as it is
        }
        journal.keep(result.copy)  # the next update or variant may be one too many
    if ranks.first:
        write_json(result, output_path(options, result))
        finish(result, options)
    return result


def output_path(options: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Of the JSON file."""
    device = "cuda" if "gpu" in result["hardware"] else "cpu"
    return options.output or Path(f"runs/bench/train-{result['preset']}-{device}.json")


def finish(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print and draw."""
    print_result(result)
    path = output_path(options, result)
    say(f"written: {path}")
    picture = options.figure or path.with_suffix(".png")
    if figures.draw(result, picture):
        say(f"drawn: {picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    quiet_logs()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        with connected(choose_device(options.device)) as ranks:
            run(options, ranks)
    except ValueError as error:
        sys.stderr.write(f"bench_train.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
