"""Compare training runs: held-out loss over updates, tokens, operations and seconds.

Runs of one name are seeds of one setting: its line is their mean, its band their smallest and
largest value. Updates, tokens and seconds of training (validation aside) come from the log's
``wpb`` and ``train_wall``, operations from the planner's count for the options of the checkpoint.
Runs that shared their machine with others can have seconds of an update that were measured apart.
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ..command_line import columns
from .logs import Curves, newest_log, read_log
from .run_files import COLORS

_MEANS = {
    "tokens_per_s": ("tokens/s", ",.0f"),
    "moe_util_slot": ("rows in use %", ".1f"),
    "moe_util_load": ("mean load / largest %", ".1f"),
    "moe_drop": ("choices dropped %", ".1f"),
}


@dataclass(frozen=True)
class Point:
    """One validation: the loss in bits, and what training had used up by then."""

    bits: float
    updates: float
    tokens: float
    seconds: float
    operations: float | None  # None if they cannot be counted


@dataclass(frozen=True)
class Run:
    """Validations of a run, and means by the names of _MEANS, of the last fifth but the speed."""

    points: list[Point]
    means: dict[str, float]
    note: str | None = None  # why operations cannot be counted

    def at_speed(self, seconds: float) -> "Run":
        """Return the run as if every update had taken so many seconds."""
        points = [replace(p, seconds=seconds * p.updates) for p in self.points]
        speed = {"tokens_per_s": points[-1].tokens / points[-1].seconds}
        return replace(self, points=points, means={**self.means, **speed})


def read_speeds(file: Path) -> dict[str, float]:
    """Return ``seconds_per_update`` of a JSON file: seconds by name of a setting."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["seconds_per_update"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{file}: expected {{"seconds_per_update": {{NAME: S}}}}') from error


def split_name(text: str) -> tuple[str, Path]:
    """Return the name and path of ``[NAME=]PATH``; by default the file's name without its seed.

    >>> split_name("runs/dense-seed2")[0], split_name("moe_s1.log")[0], split_name("a b=c")[0]
    ('dense', 'moe', 'a b')
    """
    name, equals, path = text.rpartition("=")
    stem = Path(path).resolve().name.removesuffix(".log")
    return name if equals else re.sub(r"[-_.](seed|s)[-_]?\d+$", "", stem), Path(path)


def read_run(path: Path) -> Run:
    """Read a run: a folder with its newest log and ``checkpoint_last.pt``, or a log beside it.

    Raises:
        ValueError: there is no log, or no training or validation in it.
    """
    log = newest_log(path) if path.is_dir() else path
    if log is None or not log.is_file():
        raise ValueError(f"{path}: there is no log; name the file of fairseq's --log-file")
    curves = read_log(log)
    if not (curves.valid and curves.train):
        raise ValueError(f"{log}: no lines of training and validation (fairseq's metrics)")
    flops, note = None, None
    try:
        from ..plan.stored import operations_per_token

        flops = operations_per_token(log.parent / "checkpoint_last.pt")
    except (ImportError, ValueError) as error:  # the layer alone is installed; another model
        note = f"{path}: no operations: {error}"
    return Run(*_read(curves, flops), note)


def _read(curves: Curves, flops: float | None) -> tuple[list[Point], dict[str, float]]:
    updates = sorted(curves.train)
    rows = [curves.train[update] for update in updates]
    steps = [end - begin for begin, end in zip([0, *updates], updates, strict=False)]
    each = [row.get("wpb", 0) * step for row, step in zip(rows, steps, strict=True)]
    tokens, seconds = [0, *accumulate(each)], [0, *accumulate(r.get("train_wall", 0) for r in rows)]
    points = []
    for update in sorted(curves.valid):
        ntokens, time = (interpolate([0, *updates], used, update) for used in (tokens, seconds))
        operations = None if flops is None else flops * ntokens
        points.append(Point(curves.valid[update]["loss"], update, ntokens, time, operations))
    means = {"tokens_per_s": tokens[-1] / seconds[-1]} if seconds[-1] else {}
    last = rows[-max(1, len(rows) // 5) :]
    found = {name: [row[name] for row in last if name in row] for name in _MEANS}
    means |= {name: statistics.mean(values) for name, values in found.items() if values}
    return points, means


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x on the line through the points, whose xs grow; at an end, that end's y.

    >>> interpolate([0, 10, 20], [1.0, 2.0, 4.0], 15), interpolate([0, 10], [1.0, 2.0], 30)
    (3.0, 2.0)
    """
    after = next((i for i, each in enumerate(xs) if each >= x), len(xs) - 1)
    before = max(after - 1, 0)
    share = min(1.0, (x - xs[before]) / (xs[after] - xs[before] or 1))
    return ys[before] + share * (ys[after] - ys[before])


def _gap(run: Run, base: Run, axis: str) -> float:
    """Return the bits of a run less the base's at the largest x that both reached."""
    ends = []
    for each in (run, base):
        xs = [getattr(point, axis) for point in each.points]
        ends.append((xs, [point.bits for point in each.points]))
    x = min(xs[-1] for xs, _ in ends)
    mine, theirs = (interpolate(xs, ys, x) for xs, ys in ends)
    return mine - theirs


def table(settings: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return lines: a row for each measure, a column for each setting; gaps are to the first."""
    first, *others = of_settings = list(settings.values())

    def row(title: str, form: str, values: Iterable[Sequence[float]]) -> tuple[str, ...]:
        cells = []
        for each in values:
            text = format(statistics.mean(each), form) if each else "-"
            differ = len(each) > 1 and min(each) < max(each)
            cells.append(text + (f" ({min(each):{form}} to {max(each):{form}})" if differ else ""))
        return (title, *cells)

    def ends(name: str) -> Iterator[list[float]]:
        return ([getattr(run.points[-1], name) for run in runs] for runs in of_settings)

    rows = [("", *settings), ("runs", *(str(len(runs)) for runs in of_settings))]
    rows += [row("updates", ",.0f", ends("updates")), row("held-out bits", ".3f", ends("bits"))]
    for axis in known_axes(settings)[:1] + known_axes(settings)[2:]:  # tokens say what updates do
        gaps = ([_gap(a, b, axis) for a in runs for b in first] for runs in others)
        rows.append(("  gap at equal " + axis, "-", *row("", "+.3f", gaps)[1:]))
    for name, (title, form) in _MEANS.items():
        means = ([r.means[name] for r in runs if name in r.means] for runs in of_settings)
        rows.append(row(title, form, means))
    return columns(rows)


def known_axes(settings: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return the axes that every point has."""
    points = [point for runs in settings.values() for run in runs for point in run.points]
    names = ("updates", "tokens", "operations", "seconds")
    return [name for name in names if all(getattr(p, name) is not None for p in points)]


def draw_comparison(
    settings: Mapping[str, Sequence[Run]], picture: Path, time: str = "seconds of training"
) -> None:
    """Draw the held-out loss over each axis that all runs know; ``time`` is the title of seconds.

    Tokens are left out if all updates have as many.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    axes_of = known_axes(settings)
    runs_of = [run for runs in settings.values() for run in runs]
    if len({round(p.tokens / p.updates) for run in runs_of for p in run.points}) == 1:
        axes_of.remove("tokens")
    figure = Figure(figsize=(4 * len(axes_of), 3.6), layout="constrained")
    grid = figure.subplots(1, len(axes_of), sharey=True, squeeze=False)[0]
    for axes, name in zip(grid, axes_of, strict=True):
        for (title, runs), color in zip(settings.items(), COLORS * len(settings), strict=False):
            # seeds may have stopped at different updates: the band is where all have values
            shared = set.intersection(*({p.updates for p in run.points} for run in runs))
            of_seeds = [[p for p in run.points if p.updates in shared] for run in runs]
            by_update = list(zip(*of_seeds, strict=True))
            xs = [statistics.mean(getattr(p, name) for p in each) for each in by_update]
            bits = [[p.bits for p in each] for each in by_update]
            label = title if len(runs) == 1 else f"{title} ({len(runs)} seeds)"
            axes.plot(xs, list(map(statistics.mean, bits)), color=color, label=label)
            band = list(map(min, bits)), list(map(max, bits))
            axes.fill_between(xs, *band, color=color, alpha=0.25)
        axes.set(xlabel=time if name == "seconds" else name)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    # the first validations would squeeze the rest
    most = sorted(p.bits for run in runs_of for p in run.points)
    grid[0].set(ylabel="held-out loss (bits)", ylim=(None, most[int(0.8 * (len(most) - 1))]))
    grid[-1].legend()
    figure.savefig(picture, dpi=150)
