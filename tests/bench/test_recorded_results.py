"""The result files of this repository: their page, and README's figure."""

from pathlib import Path

import plot

RESULTS = Path(__file__).parents[2] / "scripts" / "bench" / "results"


def test_the_page_names_every_result():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in RESULTS.glob("*.json") if path.name not in page] == []


def test_readmes_figure_can_be_drawn(tmp_path):
    plot.draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000 and plot.FIGURE.exists()
