"""The result files of this repository: their figures, their page, and plot.py on them."""

import json
from pathlib import Path

import plot

ROOT = Path(__file__).parents[2]


def test_recorded_results_can_be_drawn(tmp_path):
    """The result files of this repository, whatever their age."""
    paths = sorted((ROOT / "scripts" / "bench" / "results").glob("*.json"))
    assert plot.main([*map(str, paths), "--out", str(tmp_path)]) == 0
    kinds = {json.loads(path.read_text(encoding="utf-8"))["benchmark"] for path in paths}
    assert {"layer", "train", "alltoall"} <= kinds
    for path in paths:  # its own figure lies beside it, and the page names it
        own = path.with_suffix(".png")
        if path.name.startswith("golden-"):  # drawn together with the layer's times
            own = path.parent / "figures" / "overview.png"
        assert own.exists(), path
        assert path.name in (path.parent / "README.md").read_text(encoding="utf-8")
