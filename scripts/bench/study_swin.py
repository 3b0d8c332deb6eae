"""What experts do for a small SwinV2-MoE: held-out accuracy, how they are used, and a step's time.

    python scripts/bench/study_swin.py --threads 1 --data digits --save-dir runs/swin-study

The example's model (scripts/examples/swin_moe, preset tiny: 6 blocks, 2 of them with 4 experts,
top-1, capacity factor 1.25) and the dense model of as many operations per token, on scikit-learn's
digits and on those of matplotlib's fonts with a family of fonts held out, three seeds each. The
experts are balanced by the published losses, by a load bias in their place, or by nothing.
Utilisation (fairseq_tutel/moe/metrics.py has the formulas) is that of the last quarter of the
training steps. Last, the models of the first seed take turns in steps of training; the time of one
over another's is the median over the turns with a 95 % interval. With ``--save-dir`` a study that
was stopped goes on from its output file.

    python -m fairseq_tutel.launch --nproc-per-node 2 --bind none -- python \\
        scripts/bench/study_swin.py --threads 1 --step-times runs/swin-study

loads the models that the first command saved there (``--save-dir``), spreads their experts over
the ranks without a capacity, where a step waits for the busiest rank, and times that.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from bench_swin import pair_ratio
from measure import Case, percentiles, time_cases
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_clock, add_defaults, check_clock, command_line, expect_known, words
from swin_work import example, forward_macs, sparse_layers
from torch.distributed import all_reduce

from fairseq_tutel import moe, training

train = example("train")

NO_LOSS = ["--aux-weight", "0"]
# name -> words of the example's command line
METHODS = {
    "dense": ["--num-experts", "0"],
    "losses": [],
    "load bias": [
        *NO_LOSS,
        "--option",
        "load_bias=quantile",
        "--option",
        "load_importance_loss=False",
    ],  # fmt: skip
    "nothing": NO_LOSS,
}
DROPLESS = [
    word
    for option in ("capacity_factor=0.0", "eval_capacity_factor=0.0", "batch_prioritized=False")
    for word in ("--option", option)
]
# the example's name, epochs that fit half a minute on one core, and of them those of warm-up
DATA = {"digits": ("digits", 10, 2.0), "glyphs": ("glyphs:0123456789", 18, 3.0)}
USE = ("slot", "load", "drop", "dead")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    for name, known in (("data", DATA), ("methods", METHODS)):
        add(
            f"--{name}",
            default=list(known),
            help=f"of {', '.join(known)} (default: all)",
            **words(),
        )
    add_defaults(parser, {
        "seeds": (3, "of each"),
        "batch-size": (64, "images of a step"),
        "repetitions": (31, "turns of timed steps"),
    })  # fmt: skip
    add("--epochs", type=int, help="in place of those of the data set")
    add("--save-dir", type=Path, help="the first seed's models are saved here, for --step-times")
    add("--step-times", type=Path, metavar="DIR", help="time steps of models saved there, no more")
    add_clock(parser)
    add("--output", type=Path, help="JSON file (default: runs/bench/swin-study.json)")
    return parser.parse_args(argv)


class Run(train.Run):
    """A training of the example that keeps counts of what its layers routed in training steps."""

    def __init__(self, words: Sequence[str], ranks: Ranks):
        super().__init__(train.parse(list(words)), ranks.rank, ranks.world_size, ranks.device)
        self.counts: list[moe.RoutingCounts] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Any]:
        """As the example's."""
        with super().collecting() as aux:
            yield aux
        if aux is not None and self.model.training:
            reports = [report for _, report in aux.layers]
            self.counts.append(moe.routing_counts(reports, self.layers[0].groups))

    def late_use(self) -> dict[str, float]:
        """Utilisation of the last quarter of the steps, mean over them and the layers."""
        steps = [
            moe.utilisation(counts) for counts in self.counts[-max(len(self.counts) // 4, 1) :]
        ]
        means = {n: torch.stack([getattr(u, n).double().mean() for u in steps]) for n in USE}
        return {name: values.mean().item() for name, values in means.items()}


def command(data: str, method: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Words of the example's command line."""
    images, epochs, warmup = DATA[data]
    epochs = epochs if options.epochs is None else options.epochs
    return [
        "--data", images, "--batch-size", str(options.batch_size), "--seed", str(seed),
        "--epochs", str(epochs), "--warmup", str(warmup), *METHODS[method],
    ]  # fmt: skip


def train_one(data: str, method: str, seed: int, options, ranks: Ranks) -> tuple[Run, dict]:
    """(a trained model, what is reported of it)."""
    begin, cpu = time.perf_counter(), time.process_time()
    words = command(data, method, seed, options)
    run = Run(words, ranks)
    if seed == 1 and options.save_dir:
        run.options.save_dir = saved_in(options.save_dir, data, method)
        shutil.rmtree(run.options.save_dir, ignore_errors=True)  # of a training that was stopped
    run.say = lambda text: None
    accuracy = run.train()
    found = {
        "data": data,
        "method": method,
        "seed": seed,
        "command": ["train.py", *words],
        "accuracy": 100 * accuracy,
        "use": run.late_use() if run.counts else None,
        # without slot: evaluation has no padded rows
        "held_out_use": run.use and {n: getattr(run.use, n).mean().item() for n in USE[1:]},
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }
    return run, found


def model_of(run: Run) -> dict[str, Any]:
    """Parameters, and multiply-accumulates of a forward pass per image of a batch."""
    images = run.options.batch_size
    macs = forward_macs(run.config, images) / images
    layers = list(sparse_layers(run.config, images))
    if run.config.moe["capacity_factor"] > 0:
        empty = sum(8 * (s.experts * s.capacity - s.tokens) * s.model_dim**2 for s in layers)
        macs_of_tokens = macs - empty / images
    else:  # no row is empty; forward_macs knows a capacity only
        computed = sum(8 * s.experts * s.capacity * s.model_dim**2 for s in layers)
        needed = sum(8 * s.tokens * s.model_dim**2 for s in layers)
        macs = macs_of_tokens = macs + (needed - computed) / images
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "macs_per_image": macs_of_tokens,
        "macs_per_image_with_empty_rows": macs,
    }


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By data set and method: accuracy of the seeds, mean and range; mean utilisation."""
    found = []
    for data, method in dict.fromkeys((run["data"], run["method"]) for run in runs):
        mine = [run for run in runs if (run["data"], run["method"]) == (data, method)]
        accuracy = [run["accuracy"] for run in mine]
        row = {"data": data, "method": method, "seeds": len(mine)}
        row["accuracy"] = {
            "mean": statistics.mean(accuracy),
            "range": [min(accuracy), max(accuracy)],
        }
        if mine[0]["use"]:
            row["use"] = {n: statistics.mean(run["use"][n] for run in mine) for n in USE}
            row["load_range"] = [
                choose(run["use"]["load"] for run in mine) for choose in (min, max)
            ]
        found.append(row)
    return found


def time_steps(runs: dict[str, Run], options, ranks: Ranks) -> dict[str, Any]:
    """Steps of training of several models, in turns; ratios to the first one's time."""
    names = list(runs)

    def step(run: Run):
        last = run.options.epochs * run.steps - 1  # the learning rate is at its smallest
        start = torch.Generator().manual_seed(0)

        def forward(number):
            indices = torch.randperm(len(run.images), generator=start)[: options.batch_size]
            run.step(last, indices)
            return (), ()

        return forward

    cases = [Case(name, step(run)) for name, run in runs.items()]
    for run in runs.values():
        run.counts.clear()
    how = {"barrier": ranks.barrier, "processor_time": options.processor_time}
    times = time_cases(cases, ranks.device, options.repetitions, **how)
    times = {name: {"step": ranks.slowest(of["forward"])} for name, of in times.items()}
    return {
        "clock": "processor" if options.processor_time else "wall",
        "images": options.batch_size,
        "ms": {name: percentiles(of["step"]) for name, of in times.items()},
        "over": {
            f"{above}/{below}": pair_ratio(times, above, below, "step")
            for below in names
            for above in names
            if names.index(above) > names.index(below)
        },
        "raw_ms": {name: of["step"] for name, of in times.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Accuracy, utilisation, step times."""

    def accuracy(row):
        low, high = row["accuracy"]["range"]
        return f"{row['accuracy']['mean']:.2f} ({low:.2f}-{high:.2f})"

    shown = {"data": "{data}", "balanced by": "{method}", "held-out accuracy, %": accuracy}
    for name in USE:
        shown[name] = lambda row, name=name: f"{row['use'][name]:.1f}" if "use" in row else "-"
    say(f"SwinV2-MoE, preset tiny, on {device_name(result)}, {result['world_size']} rank(s)")
    if result.get("table"):
        say(table(result["table"], shown))
    for name, of in result["models"].items():
        say(f"{name}: {of['parameters']} parameters, {of['macs_per_image']:.4g} MACs per image, "
            f"{of['macs_per_image_with_empty_rows']:.4g} with empty rows")  # fmt: skip
    if steps := result.get("step"):
        say(", ".join(f"{name} {ms['p50']:.1f} ms" for name, ms in steps["ms"].items()))
        for name, of in steps["over"].items():
            low, high = of["interval"]
            ratio = f"{of['median']:.3f} ({low:.3f}-{high:.3f})"
            say(f"{name}: {ratio}, steps of {steps['images']} images")
    for name, share in result.get("util_rank", {}).items():
        say(f"{name}: util_rank {share:.1f} %")


def study(options: argparse.Namespace, ranks: Ranks) -> None:
    """Train everything, then time steps of the first seed's models of the last data set."""
    if ranks.world_size > 1:
        raise ValueError("the study trains on one rank; several are for --step-times")
    path, folder = options.output or Path("runs/bench/swin-study.json"), options.save_dir
    runs = unfinished(path) if folder else []
    if folder and not runs and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--save-dir {folder}: not empty, and {path} is no unfinished study")
    report = Report("swin-study", ranks, path)
    kept: dict[str, Run] = {}

    def whole():
        models = {name: model_of(run) for name, run in kept.items()}
        return {"models": models, "table": summarise(runs), "runs": runs}

    todo = itertools.product(options.data, range(1, options.seeds + 1), options.methods)
    for data, seed, method in todo:
        if (data, seed, method) in {(run["data"], run["seed"], run["method"]) for run in runs}:
            if seed == 1:
                kept[method] = Run(command(data, method, seed, options), ranks)
                kept[method].options.save_dir = saved_in(folder, data, method)
                kept[method].load()
            continue
        run, found = train_one(data, method, seed, options, ranks)
        runs.append(found)
        say(f"{data}, seed {seed}, {method}: {found['accuracy']:.2f} %, "
            f"{found['cpu_seconds']:.0f} s of CPU")  # fmt: skip
        if seed == 1:
            kept[method] = run
        report.keep(whole)
    steps = time_steps(kept, options, ranks)
    report.finish({**whole(), "step": steps}, show)


def unfinished(path: Path) -> list[dict[str, Any]]:
    """The trainings of a study that was stopped, as :class:`~runner.Report` left them."""
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return result["runs"] if result.get("complete") is False else []


def saved_in(folder: Path, data: str, method: str) -> Path:
    """The folder of a model."""
    return folder / f"{data}-{method.replace(' ', '-')}"


def step_times(options: argparse.Namespace, ranks: Ranks) -> None:
    """Steps of saved models on these ranks, without a capacity, and how the ranks are used."""
    data, runs = options.data[-1], {}
    for method in options.methods:
        words = [*command(data, method, 1, options), *DROPLESS]
        run = runs[method] = Run(words, ranks)
        run.options.save_dir = saved_in(options.step_times, data, method)
        if not training.checkpoint_exists(run.path()):
            raise ValueError(f"--step-times: no {run.path()}")
        run.load()
    path = options.output or Path(f"runs/bench/swin-steps-{ranks.world_size}.json")
    report = Report("swin-steps", ranks, path, data=data)
    steps = time_steps(runs, options, ranks)
    used = {name: rank_use(run, ranks) for name, run in runs.items() if run.counts}
    models = {name: model_of(run) for name, run in runs.items()}
    report.finish({"models": models, "step": steps, "util_rank": used}, show)


def rank_use(run: Run, ranks: Ranks) -> float:
    """``moe_util_rank`` of the timed steps, mean over them and the layers."""
    steps = [torch.stack(each) for each in zip(*run.counts, strict=True)]
    if ranks.world_size > 1:
        for each in steps:
            all_reduce(each)
    return moe.utilisation(moe.RoutingCounts(*steps)).rank.mean().item()


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """One of the two."""
    expect_known("--data", options.data, list(DATA))
    expect_known("--methods", options.methods, list(METHODS))
    check_clock(options, ranks)
    (step_times if options.step_times else study)(options, ranks)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
