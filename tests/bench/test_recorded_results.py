"""The result files of this repository: their pages, and README's figure."""

from pathlib import Path

import plot

RESULTS = Path(__file__).parents[2] / "scripts" / "bench" / "results"


def test_the_pages_name_every_result():
    pages = "".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    assert [path.name for path in RESULTS.glob("*.json") if path.name not in pages] == []


def test_readmes_figure_can_be_drawn(tmp_path):
    plot.draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000
    assert (plot.FIGURES / "overview.png").exists()
