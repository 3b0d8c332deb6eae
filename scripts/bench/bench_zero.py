"""Optimizer state per rank and time of an update, with --zero-sharding os and without.

    python -m fairseq_tutel.launch --nproc-per-node 4 -- python scripts/bench/bench_zero.py

Two trainers of one model (of bench_train.py) on several ranks, in turn. Counted are the bytes of
all tensors in the optimizer's state after the first update, on each rank.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from bench_train import timed_update
from measure import percentiles
from ranks import Ranks
from record import device_name, say, table
from runner import Report, command_line
from train_models import PRESETS, Run, load_config, random_samples, tiny_overrides

from fairseq_tutel.distributed import gather_texts, is_expert

_SHARDING = {"replicated": "none", "sharded": "os"}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, {"x4": PRESETS["x4"]})
    of_config = "of bench_train's preset x4, e.g. common.fp16=true; may be repeated"
    add = parser.add_argument
    add("--override", action="append", default=[], metavar="KEY=VALUE", help=of_config)
    add("--updates", type=int, default=15, help="measured updates of each (default: 15)")
    add("--output", type=Path, help="JSON file (default: runs/bench/zero-RANKS.json)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.updates = 2
    return options


def state_bytes(run: Run, ranks: Ranks) -> dict[str, list[int]]:
    """By rank: bytes of the optimizer's state of dense parameters, and of experts."""
    state = run.trainer.optimizer.optimizer.state
    found = {"dense": 0, "experts": 0}
    for param, entries in state.items():
        tensors = [value for value in entries.values() if torch.is_tensor(value)]
        found["experts" if is_expert(param) else "dense"] += sum(each.nbytes for each in tensors)
    texts = gather_texts(f"{found['dense']} {found['experts']}")
    rows = [[int(word) for word in text.split()] for text in texts]
    return dict(zip(found, map(list, zip(*rows, strict=True)), strict=True))


def print_result(result: dict[str, Any]) -> None:
    """A row of each trainer."""
    say(f"{result['world_size']} ranks on {device_name(result)}: {result['title']}")
    rows = [{"name": name, **found} for name, found in result["results"].items()]
    mib = 2**20
    shown = {
        "optimizer state": "{name}",
        "s/update": "{seconds[p50]:.3f}",
        "dense, MiB by rank": lambda r: ", ".join(f"{n / mib:.1f}" for n in r["bytes"]["dense"]),
        "experts": lambda r: ", ".join(f"{n / mib:.1f}" for n in r["bytes"]["experts"]),
    }
    say(table(rows, shown))
    say(f"time of an update, sharded over replicated: {result['ratios']['seconds']:.3f}")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_several()
    preset = PRESETS["x4"]
    tiny = tiny_overrides(preset, ranks.world_size) if options.tiny else ()
    changes = [*tiny, *options.override]
    runs = []
    for name, sharding in _SHARDING.items():
        sharded = f"distributed_training.zero_sharding={sharding}"
        runs.append((name, Run("moe", load_config(preset, [*changes, sharded], ranks))))
    config = runs[0][1].config
    samples = random_samples(config, config.task.dict_size + 4, 4, options.seed + ranks.rank)
    report = Report(
        "zero",
        ranks,
        options.output or Path(f"runs/bench/zero-{ranks.world_size}.json"),
        title="; ".join([preset.about, *changes]),
    )
    results = {name: {"seconds": [], "losses": []} for name, _ in runs}
    for number in range(-2, options.updates):
        for name, run in runs if number % 2 else runs[::-1]:
            seconds, loss = timed_update(run, samples[number % len(samples)], ranks)
            results[name]["losses"].append(loss)
            if number >= 0:
                results[name]["seconds"].append(seconds)
    for name, run in runs:
        raw = ranks.slowest(results[name]["seconds"])
        results[name] |= {
            "seconds": percentiles(raw),
            "raw_seconds": raw,
            "bytes": state_bytes(run, ranks),
        }
    same = results["sharded"]["losses"] == results["replicated"]["losses"]
    medians = [results[name]["seconds"]["p50"] for name in ("sharded", "replicated")]
    ratios = {"seconds": medians[0] / medians[1]}
    report.finish({"results": results, "same_losses": same, "ratios": ratios}, print_result)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
