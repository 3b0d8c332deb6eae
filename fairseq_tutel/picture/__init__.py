"""Draw a training run: ``python -m fairseq_tutel.picture SAVE_DIR [--log FILE]``.

loss.png      cross-entropy without the gate loss, and where the run was resumed; from fairseq's
              log in the formats simple and json (a --log-file, or the output of the terminal)
experts.png   load of every expert, and how much of the experts is in use; from
              expert_load.jsonl (written with --moe-load-log-interval N)
exchange.png  exchange choices that the tuner tried and took; from exchange.jsonl (written with
              --moe-overlap-degree auto, for example)
trace-*.png   experts of single tokens, and the spread of the load in each layer; of the newest
              passes of train, valid or eval in trace-rank-*.jsonl (written with --moe-trace FOLDER)

A picture is left out if its file is missing; if all are, a line for each says how to get it.

Several runs are compared: ``python -m fairseq_tutel.picture [NAME=]RUN [NAME=]RUN ...``, where a
run is a SAVE_DIR or a log. Runs of one name, or of names that differ in -seedN or -sN alone, are
seeds of one setting. A table and comparison.png have the held-out loss over updates, tokens,
operations (of the planner, from checkpoint_last.pt) and seconds of training. On a machine that
others use, too, --seconds-per-update FILE gives seconds that were measured apart, as JSON:
{"seconds_per_update": {"NAME": 0.21, ...}}.
"""

import argparse
import importlib.util
import itertools
import logging
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..command_line import CommandLine
from .compare import Run, draw_comparison, read_run, read_speeds, split_name, table
from .logs import Curves, newest_log, read_log, read_metrics, resumed_at
from .run_files import BLUE, COLORS, GREY, RED, order_of_layer, read_lines
from .trace import draw_trace, read_traces


def _figure(panels: int, height: float = 2.4):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.4 + height * panels), layout="constrained")
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axes in grid:
        axes.grid(alpha=0.3)
    return figure, grid


def draw_loss(curves: Curves, picture: Path) -> None:
    """Draw the cross-entropy over updates, with the perplexity on the right."""
    figure, (axes,) = _figure(1, 3.2)
    for label, rows, style in (("train", curves.train, "-"), ("valid", curves.valid, "o-")):
        losses = [rows[update]["loss"] for update in sorted(rows)]
        color = BLUE if label == "train" else RED
        axes.plot(sorted(rows), losses, style, color=color, markersize=4, label=label)
    for number, update in enumerate(curves.resumed):
        label = None if number else "resumed from a checkpoint"
        axes.axvline(update, color=GREY, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="update", ylabel="loss (bits per token)")
    axes.set_title("Loss in training and validation (cross-entropy, without the gate loss)")
    axes.legend()
    bottom, top = axes.get_ylim()
    axes.twinx().set(ylim=(2**bottom, 2**top), yscale="log", ylabel="perplexity")
    figure.savefig(picture, dpi=150)


def draw_experts(lines: Sequence[dict], picture: Path) -> None:
    """Draw each expert's load over updates, a heat map per MoE layer, and the utilisation."""
    records = {line["update"]: line for line in lines}  # the last line of an update made twice
    updates = sorted(records)
    layers = sorted(records[updates[-1]]["layers"], key=order_of_layer)
    used = [update for update in updates if "utilisation" in records[update]]
    figure, grid = _figure(len(layers) + bool(used))
    for axes, layer in zip(grid, layers, strict=False):
        loads = [records[update]["layers"][layer] for update in updates]
        shares = [[load * len(row) / max(1, sum(row)) for load in row] for row in loads]
        most = max(map(len, loads))  # a run may have got more experts
        edges = [-0.5 + number for number in range(most + 1)]
        by_expert = list(itertools.zip_longest(*shares, fillvalue=math.nan))
        mesh = axes.pcolormesh([0, *updates], edges, by_expert, cmap="RdBu_r", vmin=0, vmax=2)
        axes.grid(False)
        axes.set(title=f"MoE layer {layer} (the first is 0)", ylabel="expert")
        axes.invert_yaxis()
    bar = figure.colorbar(mesh, ax=list(grid[: len(layers)]), extend="max", ticks=[0, 1, 2])
    bar.set_label("load relative to an even share")
    names = {"slot": "rows in use", "load": "mean load / largest", "drop": "choices dropped"}
    for (name, label), color in zip(names.items(), (BLUE, RED, GREY), strict=True):
        known = [u for u in used if all(name in v for v in records[u]["utilisation"].values())]
        of_layers = [[v[name] for v in records[u]["utilisation"].values()] for u in known]
        means = list(map(statistics.mean, of_layers))
        if any(means) or known and name == "drop":  # without a capacity there are no slots to use
            grid[-1].plot(known, means, color=color, label=label)
            grid[-1].set(title="Utilisation, mean over layers", ylabel="%", ylim=(0, 102))
            grid[-1].legend(fontsize="small")
    grid[-1].set_xlabel("update")
    figure.savefig(picture, dpi=150)


def choice_name(choice: dict) -> str:
    """Return a short name of an exchange choice: ``2dh d=4`` (overlap degree), ``linear r=2``."""
    short = {"overlap_degree": "d=", "r": "r="}
    return " ".join(f"{short.get(name, '')}{value}" for name, value in choice.items())


def draw_exchange(lines: Sequence[dict], picture: Path) -> None:
    """Draw the time of the tuner's trials (dots) and choices (lines) over updates, per key."""
    from matplotlib.lines import Line2D

    keys = list(dict.fromkeys(line["key"] for line in lines))
    names = list(dict.fromkeys(choice_name(line["choice"]) for line in lines))
    colors = {each: COLORS[number % len(COLORS)] for number, each in enumerate(names)}
    end = max(line["update"] for line in lines)
    figure, grid = _figure(len(keys), 2.2)
    for axes, key in zip(grid, keys, strict=True):
        mine = [line for line in lines if line["key"] == key]
        decisions = [line for line in mine if line["what"] == "decision"]
        for line in (line for line in mine if line["what"] == "trial"):
            milliseconds = statistics.median(line["samples"]) / 1000
            axes.plot(line["update"], milliseconds, "o", color=colors[choice_name(line["choice"])])
        ends = [*(line["update"] for line in decisions), end][1:]
        for line, until in zip(decisions, ends, strict=False):
            span = line["update"], max(until, line["update"] + 1)
            axes.hlines(line["us"] / 1000, *span, colors[choice_name(line["choice"])])
        # older versions wrote the key alone, without "about"
        title = textwrap.fill(mine[-1].get("about", key), 60)  # the legend is beside it
        axes.set_title(title, fontsize="medium")
        axes.set(ylabel="ms per step", ylim=(0, None))
    grid[-1].set_xlabel("update (dots: trials; lines: the choice in use)")
    handles = [Line2D([], [], marker="o", color=colors[each], label=each) for each in names]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.savefig(picture, dpi=150)


def draw_run(folder: Path, log: Path | None, out: Path) -> tuple[list[Path], list[str]]:
    """Draw the pictures of fairseq's ``--save-dir`` and log.

    Returns:
        paths of the pictures; if there is none, a line per picture with the reason, else a line if
        there is no picture of the loss.
    """
    curves = read_log(log) if log else Curves()
    found = curves if curves.train or curves.valid else None
    why = f"{folder} has no .log file; name the file of --log-file by --log FILE"
    if log:
        why = f"{log} has no lines of fairseq's metrics"
    jobs: list[tuple] = [("loss.png", draw_loss, found, why)]
    for name, draw, file, flag in (
        ("experts.png", draw_experts, "expert_load.jsonl", "--moe-load-log-interval N"),
        ("exchange.png", draw_exchange, "exchange.jsonl", "--moe-overlap-degree auto"),
    ):
        why = f"{folder / file} is not there or has no lines; a run writes it with {flag}"
        jobs.append((name, draw, list(read_lines(folder / file)), why))
    why = f"{folder} has no trace-rank-0.jsonl with passes; a run writes it with --moe-trace FOLDER"
    traces = read_traces(folder) or {"*": None}
    jobs += [(f"trace-{mode}.png", draw_trace, trace, why) for mode, trace in traces.items()]
    out.mkdir(parents=True, exist_ok=True)
    pictures, missing = [], []
    for name, draw, data, why in jobs:
        if data:
            draw(data, out / name)
            pictures.append(out / name)
        else:
            missing.append(f"no {name}: {why}")
    if pictures:  # a run does not write all files
        missing = [line for line in missing if line.startswith("no loss.png")]
    return pictures, missing


def compare_runs(words: Sequence[str], picture: Path, speeds: Path | None = None) -> list[str]:
    """Draw runs of several settings, each ``[NAME=]PATH``, and return the lines of their table.

    ``speeds``: file of :func:`read_speeds` (default None: seconds are those of the logs).
    """
    settings: dict[str, list[Run]] = {}
    seconds = None if speeds is None else read_speeds(speeds)
    for name, path in map(split_name, words):
        run = read_run(path)
        if seconds is not None:
            if name not in seconds:
                raise ValueError(f"{speeds} has no seconds of {name}, only of {', '.join(seconds)}")
            run = run.at_speed(seconds[name])
        settings.setdefault(name, []).append(run)
    for logger in (None, "fairseq"):  # fairseq's import, for operations, turns both up
        logging.getLogger(logger).setLevel(logging.WARNING)
    picture.parent.mkdir(parents=True, exist_ok=True)
    how = {} if speeds is None else {"time": "seconds: updates x seconds of one, measured apart"}
    draw_comparison(settings, picture, **how)
    notes = [run.note for runs in settings.values() for run in runs if run.note]
    return [*table(settings), *notes, str(picture)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 1 if nothing can be drawn, 2 for a wrong command line."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.picture",
        description="Draw a training run:\n\n" + (__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "fairseq's --save-dir; several, or logs, with a name if wanted: they are compared"
    parser.add_argument("save_dir", nargs="+", metavar="[NAME=]SAVE_DIR", help=what)
    newest = "fairseq's log of the run (default: the newest .log file in SAVE_DIR)"
    parser.add_argument("--log", type=Path, action="append", metavar="FILE", help=newest)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the pictures (default: SAVE_DIR)"
    )
    parser.add_argument(
        "--seconds-per-update", type=Path, metavar="FILE", help="of several runs, see above"
    )
    options = parser.parse_args(argv)
    folder, logs = Path(options.save_dir[0]), options.log or []
    several = len(options.save_dir) > 1
    if several and logs or len(logs) > 1:
        parser.error("--log names the log of one run; compare runs by their folders or logs alone")
    if options.seconds_per_update and not several:
        parser.error("--seconds-per-update is for a comparison of several runs")
    if not several and not folder.is_dir():
        parser.error(f"{folder}: there is no such folder")
    if logs and not logs[0].is_file():
        parser.error(f"--log {logs[0]}: there is no such file")
    if importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, f"{parser.prog}: error: matplotlib is missing: pip install matplotlib\n")
    if several:
        try:
            picture = (options.out or Path()) / "comparison.png"
            lines = compare_runs(options.save_dir, picture, options.seconds_per_update)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 0
    log = logs[0] if logs else newest_log(folder)
    pictures, missing = draw_run(folder, log, options.out or folder)
    sys.stdout.write("".join(f"{path}\n" for path in pictures))
    sys.stderr.write("".join(f"{line}\n" for line in missing))
    return 0 if pictures else 1
