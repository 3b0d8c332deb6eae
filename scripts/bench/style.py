"""Colours and lines that the figures of results share."""

from pathlib import Path

GREY, BLUE, GREEN, ORANGE = "#b0b7c3", "#1d4ed8", "#2f5d50", "#c2570c"


def finish(figure, path: Path) -> None:
    """The same lines for every figure; written."""
    for axis in figure.axes:
        axis.grid(alpha=0.4)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
