"""Picture of a trace: experts of single tokens, and the spread of the load in each layer."""

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .run_files import BLUE, RED, order_of_layer, read_lines

_FRAME = -1  # token of what has none
_TRACED_TOKENS = 100_000  # newest tokens of each rank that a picture shows


@dataclass
class Trace:
    """Newest forward passes of one mode: training, validation or evaluation."""

    experts: dict[str, int]  # their number by layer
    symbols: dict[str, list[str]]  # words of the dictionary of each stack
    pairs: dict[str, collections.Counter]  # by layer: how often a token went to an expert

    def shares(self, layer: str, token: int | None = None) -> list[float]:
        """Return the share of each expert in the choices of a token; None: of all tokens."""
        counts = [0] * self.experts[layer]
        for (each, expert), count in self.pairs[layer].items():
            counts[expert] += count * (token in (None, each))
        return [count / max(1, sum(counts)) for count in counts]

    def frequent(self, layer: str, number: int) -> list[int]:
        """Return the most frequent tokens of a layer, by the expert that they prefer."""
        totals: collections.Counter = collections.Counter()
        for (token, _), count in self.pairs[layer].items():
            totals[token] += count
        found = [token for token, _ in totals.most_common(number)]
        shares = {token: self.shares(layer, token) for token in found}
        return sorted(found, key=lambda t: (shares[t].index(max(shares[t])), -max(shares[t])))


def read_traces(folder: Path) -> dict[str, Trace]:
    """Read the newest passes of all ranks' traces, by mode."""
    heads: dict[str, dict] = {}
    traces: dict[str, Trace] = {}
    number = lambda path: int(path.stem.rpartition("-")[2])  # noqa: E731
    for file in sorted(folder.glob("trace-rank-*.jsonl"), key=number):
        passes: dict[str, collections.deque] = collections.defaultdict(collections.deque)
        for line in read_lines(file):
            for mode in line.get("modes", ()):
                if number(file) == 0:
                    heads[mode] = line
                if not line["resumed"]:
                    passes[mode].clear()
            if "modes" not in line:
                of_mode = passes[line["mode"]]
                of_mode.append(line)
                while _size(of_mode) - _size([of_mode[0]]) > _TRACED_TOKENS:
                    of_mode.popleft()
        for mode, lines in passes.items():
            head = heads.get(mode)
            if head and lines and number(file) < head["ranks"]:
                empty = {layer: collections.Counter() for layer in head["experts"]}
                trace = traces.setdefault(mode, Trace(head["experts"], head["symbols"], empty))
                for line in lines:
                    _count(line, trace.pairs)
    return traces


def _size(passes: Iterable[dict]) -> int:
    return sum(sum(lengths) for line in passes for lengths in line["lengths"].values())


def _count(line: dict, pairs: dict[str, collections.Counter]) -> None:
    for layer, choices in line["choices"].items():
        tokens = line["tokens"][layer.rpartition(".")[0]]
        if tokens is None:  # frames of speech: all are one
            tokens = [_FRAME] * len(choices)
        for token, experts in zip(tokens, choices, strict=True):
            pairs[layer].update((token, expert) for expert in experts if expert >= 0)


def draw_trace(trace: Trace, picture: Path) -> None:
    """Draw the spread of the load over the experts of each layer, and where frequent tokens go."""
    from matplotlib.figure import Figure

    layers = sorted(trace.pairs, key=order_of_layer)
    some = min(len(layers), 6)
    shown = [layers[round(i * (len(layers) - 1) / max(some - 1, 1))] for i in range(some)]
    columns = min(some, 3)
    rows = -(-some // columns)
    figure = Figure(figsize=(10, 3.6 + 3.8 * rows), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3.2, 3.8 * rows])
    _draw_spread(top.subplots(), {layer: trace.shares(layer) for layer in layers})
    grid = bottom.subplots(rows, columns, squeeze=False).flatten()
    for axes, layer in zip(grid, shown, strict=False):
        mesh = _draw_tokens(axes, trace, layer)
    for axes in grid[some:]:
        axes.remove()
    bottom.suptitle("Where the most frequent tokens go")
    bottom.colorbar(
        mesh, ax=list(grid[:some]), label="% of a token's choices", aspect=40, extend="max"
    )
    figure.savefig(picture, dpi=150)


def _draw_tokens(axes, trace: Trace, layer: str):
    """Draw a heat map of a layer: a row for each frequent token, a column for each expert."""
    tokens = trace.frequent(layer, 15)
    words = trace.symbols[layer.rpartition(".")[0]]
    known = lambda t: words[t] if 0 <= t < len(words) else str(t)  # noqa: E731
    names = ["all tokens", *("frames" if t == _FRAME else known(t) for t in tokens)]
    shares = [trace.shares(layer), *(trace.shares(layer, token) for token in tokens)]
    percent = [[100 * share for share in row] for row in shares]
    mesh = axes.imshow(percent, cmap="Blues", vmin=0, vmax=50, aspect="auto")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.axhline(0.5, color=RED)
    axes.set(title=f"MoE layer {layer}", xlabel="expert")
    return mesh


def _draw_spread(axes, shares: dict[str, list[float]]) -> None:
    """Draw percentiles over the experts of a layer as nested bars, a bar for each layer."""
    loads = [sorted(share * len(each) for share in each) for each in shares.values()]
    at = lambda load, q: load[round(q * (len(load) - 1))]  # noqa: E731
    places = range(len(loads))
    for low, high, color, label in (
        (0.0, 1.0, "#d4e0ec", "all experts"),
        (0.1, 0.9, "#92b3d3", "without the 10 % fullest and emptiest"),
        (0.25, 0.75, BLUE, "the middle half"),
    ):
        bottoms = [at(load, low) for load in loads]
        heights = [at(load, high) - bottom for load, bottom in zip(loads, bottoms, strict=True)]
        axes.bar(places, heights, 0.6, bottoms, color=color, label=label)
    medians = [at(load, 0.5) for load in loads]
    axes.hlines(
        medians, [x - 0.3 for x in places], [x + 0.3 for x in places], "black", label="median"
    )
    axes.axhline(1, color=RED, linestyle="--", linewidth=1, label="even share")
    axes.set_xticks(places, shares)
    axes.set(xlabel="MoE layer (the first is 0)", ylabel="load of an expert", ylim=(0, None))
    axes.set_title("Load of the experts of each layer, relative to an even share")
    axes.legend(fontsize="small", loc="upper center", ncol=5, bbox_to_anchor=(0.5, -0.22))
