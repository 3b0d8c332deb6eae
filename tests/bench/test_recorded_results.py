"""The result files of this repository: their page, and README's figures."""

from pathlib import Path

import plot
import pytest

RESULTS = Path(__file__).parents[2] / "scripts" / "bench" / "results"


def test_the_page_names_every_result():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in RESULTS.glob("*.json") if path.name not in page] == []


@pytest.mark.parametrize("name", list(plot.DRAWN))
def test_readmes_figures_can_be_drawn(name, tmp_path):
    plot.DRAWN[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000 and (plot.FIGURES / name).exists()
