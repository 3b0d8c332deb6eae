"""What growth gains: validation loss of the quickstart's model, dense, with experts, and grown.

    python scripts/bench/study_growth.py --folder runs/growth-study --output runs/bench/growth.json

The quickstart's language model on the text that comes with Python, without dropping tokens, on 2
ranks, in U updates of which the first half may be another model's:

- dense: stock fairseq's transformer_lm_gpt.
- experts from scratch: 8 experts, top-2.
- upcycled: the dense model of half the updates, then 8 experts, with a fresh optimizer and a
  schedule of its own for the second half.
- grown: 4 experts, and 8 from half the updates on, copies by turns; or held back by a load bias,
  which the first half was trained without, and which stays on.

Loss is the validation set's, in bits per token, without the balance loss. Seconds are those of
training, without validation, start and the commands of growth: updates times the pace of the
fastest fifth of all stretches between two validations, of each half and all seeds, since other
programs disturb hours of training and make none faster. A study that was stopped goes on where it
was. Draws the figure beside the JSON file.
"""

import argparse
import importlib.util
import itertools
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runner
from ranks import Ranks
from record import ROOT, quiet_logs, say, table
from runner import Report, add_defaults, command_line, expect_known, words
from style import BLUE, GREEN, GREY, ORANGE, finish

from fairseq_tutel import picture

sys.path.insert(0, str(ROOT / "scripts" / "quickstart"))
from corpus import build_corpus  # noqa: E402
from steps import Commands, QuickstartError, prepare  # noqa: E402

PURPLE = "#7c3aed"


@dataclass(frozen=True)
class Variant:
    """A model that is trained: by itself, or from what another one was after half the updates."""

    label: str
    color: str
    experts: int = 8  # 0: dense
    source: str | None = None
    change: str = ""  # command that makes the start of the second half
    flags: str = ""
    anew: bool = False  # whether the second half counts its updates from 0


UPCYCLE = "upcycle {source} {start} --num-experts 8 --ranks 2"
GROW = "grow {source} {start} --num-experts 8 --ranks 2"
VARIANTS = {
    "dense": Variant("dense", GREY, experts=0),
    "scratch": Variant("8 experts", BLUE),
    "few": Variant("4 experts", "#93c5fd", experts=4),
    "upcycled": Variant("dense, then 8 experts", GREEN, source="dense", change=UPCYCLE, anew=True),
    "grown": Variant("4, then 8 experts", ORANGE, source="few", change=GROW),
    "grown-exact": Variant(
        "the same, held back (load bias)",
        PURPLE,
        source="few",
        change=GROW + " --exact --moe-growth-updates {ramp}",
        flags="--moe-load-bias quantile",
    ),
}


@dataclass
class Curve:
    """Points of a run: (update, seconds of training until then, validation loss)."""

    points: list[tuple[int, float, float]] = field(default_factory=list)
    _before: float = 0.0  # seconds until the clock was stopped
    _since: float | None = None  # when it was started again

    def listen(self, line: str) -> None:
        """Take a line of the log as it is written; validation stops the clock."""
        now = time.perf_counter()
        if "Start iterating over samples" in line and self._since is None:
            self._since = now
        elif "begin validation on" in line and self._since is not None:
            self._before, self._since = self._before + now - self._since, None
        elif (found := picture.read_metrics(line)) is not None and found[0] == "valid":
            values = found[1]
            self.points.append((int(values["num_updates"]), self._before, values["loss"]))
            self._since = now

    def until(self, update: int) -> list[tuple[int, float, float]]:
        """The points up to an update."""
        return [point for point in self.points if point[0] <= update]

    def after(self, start: "Curve", update: int, anew: bool) -> "Curve":
        """These points behind those of another curve up to an update."""
        earlier = start.until(update)
        moved = update if anew else 0
        mine = [(u + moved, earlier[-1][1] + s, loss) for u, s, loss in self.points]
        return Curve([*earlier, *(point for point in mine if point[0] > update)])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--variants",
        default=list(VARIANTS),
        help=f"of {', '.join(VARIANTS)} (default: all)",
        **words(),
    )
    add_defaults(parser, {
        "seeds": (3, "of each"),
        "first-seed": (1, "the seeds are this one and the next ones"),
        "updates": (600, "U, the half of which is where models grow"),
        "validations": (24, "of each run"),
    })  # fmt: skip
    add("--folder", type=Path, default=ROOT / "runs" / "growth-study", help="of all files")
    add("--output", type=Path, default=Path("runs/bench/growth.json"), help="JSON file")
    return parser.parse_args(argv)


def quickstart() -> Any:
    """The module scripts/quickstart/main.py."""
    file = ROOT / "scripts" / "quickstart" / "main.py"
    spec = importlib.util.spec_from_file_location("quickstart_main", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data(folder: Path, updates: int) -> Path:
    """The quickstart's data-bin."""
    if not (folder / "data" / "dict.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        prepare(folder)
        quick = quickstart().Quickstart(folder, updates, [])
        quick.tokenizer(build_corpus([]))
        quick.preprocess()
    return folder / "data"


class Study:
    """All runs of a seed, in a folder of their own."""

    def __init__(self, options: argparse.Namespace, data: Path, seed: int):
        self.options, self.data, self.seed = options, data, seed
        self.folder = options.folder.absolute() / f"seed-{seed}"
        self.half = options.updates // 2

    def run(self, name: str) -> dict[str, Any]:
        """A variant's curve and commands; the one it begins as is run before.

        One that is not asked for, and that others begin as, ends with the first half.
        """
        whole = self.options.updates
        last = whole if name in self.options.variants else self.half
        found = [self.folder / name / f"run-{update}.json" for update in {last, whole}]
        kept = next(filter(Path.exists, found), self.folder / name / f"run-{last}.json")
        if not kept.exists():
            variant = VARIANTS[name]
            source = self.run(variant.source) if variant.source else None
            shutil.rmtree(self.folder / name, ignore_errors=True)  # of one that was stopped
            prepare(self.folder / name)
            kept.write_text(json.dumps(self._train(name, variant, source, last)), encoding="utf-8")
        return json.loads(kept.read_text(encoding="utf-8"))

    def _train(
        self, name: str, variant: Variant, source: dict[str, Any] | None, last: int
    ) -> dict[str, Any]:
        commands, curve, done = Commands(self.folder / name), Curve(), []
        text = self._command(variant, last)
        if source is not None:
            change = "python -m fairseq_tutel.checkpoint " + variant.change.format(
                source=shlex.quote(self._halfway(variant.source)),
                start="start.pt",
                ramp=max(self.half // 2, 1),
            )
            commands.run("change", change)
            done.append(change)
            text += " --restore-file start.pt"
        commands.run("train", text, curve.listen)
        done.append(text)
        if source is not None:
            earlier = Curve([tuple(point) for point in source["curve"]])
            curve = curve.after(earlier, self.half, variant.anew)
        cut = [" ".join(each.split()).replace(str(self.options.folder.absolute()), "FOLDER")
               for each in done]  # fmt: skip
        return {"variant": name, "seed": self.seed, "commands": cut, "curve": curve.points}

    def _halfway(self, name: str) -> str:
        """The checkpoint of a run after half the updates, X.pt."""
        folder = self.folder / name / "checkpoints"
        saved = [*folder.glob(f"checkpoint_*_{self.half}.pt")]
        saved += folder.glob(f"checkpoint_*_{self.half}-shared.pt")
        if not saved:
            raise QuickstartError(f"{self.folder / name}: no checkpoint of update {self.half}")
        return str(saved[0]).replace("-shared.pt", ".pt")

    def _command(self, variant: Variant, last: int) -> str:
        options, updates = self.options, self.options.updates
        if variant.anew:
            updates, last = updates - self.half, last - self.half
        warmup = min(30, updates // 4)
        text = quickstart().TRAIN.format(
            stop_at=last, warmup=warmup, period=updates - warmup,
            validate_every=max(1, options.updates // options.validations),
            log_every=max(1, options.updates // options.validations),
        )  # fmt: skip
        given = shlex.split(text)
        given[given.index("fairseq-train") + 1] = str(self.data)
        given[given.index("--seed") + 1] = str(self.seed)
        if variant.experts:
            given += ["--moe-expert-count", str(variant.experts), "--moe-capacity-factor", "0"]
        else:
            given = as_dense(given)
        # torch's own wrapper, as stock fairseq calls it, refuses a dense model on several CPU ranks
        given += ["--save-interval-updates", str(self.half), "--ddp-backend", "legacy_ddp"]
        return shlex.join([*given, *variant.flags.split()])


def as_dense(given: Sequence[str]) -> list[str]:
    """A training command with stock fairseq's dense model and criterion."""
    others = {"--arch": "transformer_lm_gpt", "--criterion": "cross_entropy"}
    kept: list[str] = []
    for before, word in zip(["", *given], given, strict=False):
        if word.startswith("--moe-") or before.startswith("--moe-"):
            continue
        kept.append(others.get(before, word))
    return kept


def seconds_until(
    updates: Sequence[int], runs: list[dict[str, Any]], name: str, half: int
) -> list[float]:
    """Of training until each of some updates, by the pace of the fastest fifth of each half's
    stretches."""
    paces: tuple[list[float], list[float]] = [], []
    for curve in (run["curve"] for run in runs if run["variant"] == name):
        for before, after in itertools.pairwise(curve):
            paces[before[0] >= half].append((after[1] - before[1]) / (after[0] - before[0]))
    first, second = (statistics.quantiles(each, n=5)[0] for each in paces)
    return [first * min(update, half) + second * max(0, update - half) for update in updates]


def summarise(runs: list[dict[str, Any]], half: int) -> list[dict[str, Any]]:
    """By variant: the last loss of all seeds, and the seconds until then."""
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        last = [run["curve"][-1] for run in runs if run["variant"] == name]
        losses = [point[2] for point in last]
        rows.append({
            "variant": name,
            "updates": last[0][0],
            "loss": {"mean": statistics.mean(losses), "range": [min(losses), max(losses)]},
            "seconds": seconds_until([last[0][0]], runs, name, half)[0],
            "seeds": len(last),
        })  # fmt: skip
    return rows


def show(result: dict[str, Any]) -> None:
    """The table."""

    def loss(row):
        low, high = row["loss"]["range"]
        return f"{row['loss']['mean']:.3f} ({low:.3f} to {high:.3f})"

    say(table(result["table"], {
        "model": lambda row: VARIANTS[row["variant"]].label,
        "validation loss, bits": loss,
        "updates": "{updates}",
        "seconds": lambda row: f"{row['seconds']:.0f}",
        "seeds": "{seeds}",
    }))  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Loss over updates and over seconds: the mean of the seeds, and their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    over_updates, over_time = figure.subplots(1, 2, sharey=True)
    shown, half = [row["variant"] for row in result["table"]], result["settings"]["updates"] // 2
    for name in shown:
        curves = [run["curve"] for run in result["runs"] if run["variant"] == name]
        points = list(zip(*curves, strict=False))  # by validation, of every seed
        losses = [[point[2] for point in of_seeds] for of_seeds in points]
        mean = [statistics.mean(each) for each in losses]
        variant = VARIANTS[name]
        style = {"color": variant.color, "lw": 1.4, "label": variant.label}
        updates = [of_seeds[0][0] for of_seeds in points]
        seconds = seconds_until(updates, result["runs"], name, half)
        for axes, x in ((over_updates, updates), (over_time, seconds)):
            axes.plot(x, mean, **style)
            axes.fill_between(
                x, list(map(min, losses)), list(map(max, losses)), color=variant.color, alpha=0.15,
                lw=0,
            )  # fmt: skip
    over_updates.axvline(half, color="#555555", lw=0.8, ls=":")
    over_updates.set(xlabel="update", ylabel="validation loss, bits per token")
    over_time.set(xlabel="seconds of training")
    ends = sorted(statistics.mean(run["curve"][-1][2] for run in result["runs"]
                                  if run["variant"] == name) for name in shown)  # fmt: skip
    over_updates.set_ylim(ends[0] - 0.1, ends[-1] + 1.0)
    over_updates.legend(frameon=False, fontsize=8)
    finish(figure, path)


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """All seeds, then the table and the figure."""
    expect_known("--variants", options.variants, list(VARIANTS))
    if ranks.world_size > 1 or options.updates < 4 or options.updates % 2:
        raise ValueError("one process, which starts others, and an even number of updates from 4")
    settings = {"updates": options.updates, "seeds": options.seeds}
    half = options.updates // 2
    report, runs = Report("growth-study", ranks, options.output, settings=settings), []
    try:
        data = make_data(options.folder.absolute() / "text", options.updates)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            study = Study(options, data, seed)
            for name in options.variants:
                runs.append(study.run(name))
                update, seconds, loss = runs[-1]["curve"][-1]
                say(f"seed {seed}, {name}: {loss:.3f} bits after {update} updates, {seconds:.0f} s")
                report.keep(lambda: {"table": summarise(runs, half), "runs": runs})
    except QuickstartError as error:
        raise ValueError(str(error)) from None
    result = report.finish({"table": summarise(runs, half), "runs": runs}, show)
    quiet_logs()  # importing fairseq lets every logger say everything
    draw(result, options.output.with_suffix(".png"))


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
