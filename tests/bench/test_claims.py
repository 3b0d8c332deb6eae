"""The published claims: the command, its page, its measured values, its verdicts."""

import json
import re
from pathlib import Path

import claims
import claims_figures
import claims_layer as layer
import claims_predictions as predictions
import plot
import pytest
from helpers.commands import ROOT

PAGE = claims.RESULTS / "README.md"


def test_measured_values_are_those_of_the_files_and_tests_exist():
    for claim in claims.CLAIMS.values():
        for entry in claim.measured:
            found = claims.read_value(entry, claims.RESULTS / entry["file"])
            assert found == pytest.approx(entry["value"], rel=1e-3), (claim, entry["file"])
        path, _, name = claim.test.partition("::")
        text = (ROOT / path).read_text() if path else ""
        assert not name or f"def {name}(" in text, claim
    pages = "".join(page.read_text(encoding="utf-8") for page in claims.RESULTS.glob("*.md"))
    assert not [each for each in claims.RESULTS.glob("*.json") if each.name not in pages]


def test_the_file_is_the_commands_output_and_the_page_counts_verdicts(capsys):
    assert claims.main([]) == 0
    output = capsys.readouterr().out
    written = (claims.RESULTS / "claims.txt").read_text()
    assert output == written, "python scripts/bench/claims.py > scripts/bench/results/claims.txt"
    within, better, there, not_reached = re.findall(r"(\d+) (?!%)", output.splitlines()[-1])
    page = " ".join(PAGE.read_text().split())
    counts = f"{within} are within 15 %, {better} is better, {there} have no figure"
    assert counts in page and f"and {not_reached} are not reached" in page
    missed = [each for each in claims.CLAIMS.values() if each.verdict() == claims.NOT]
    assert len(claims.CLAIMS) == 24 and all(claim.reason for claim in missed)


def test_the_most_images_that_a_gpu_had_room_for_count(tmp_path):
    over = {"dense formulation": [0.3, 0.5, 0.6]}
    results = {f"training, {n} images": {"this_over": over if n < 64 else {}} for n in (16, 32, 64)}
    path = tmp_path / "swin-small-32-h100.json"
    path.write_text(json.dumps({"results": results}))
    assert claims.CLAIMS[13].on_gpus(tmp_path) == ""  # inference was not reached
    results["inference, 16 images"] = {"this_over": {"dense formulation": [0.1, 0.25, 0.3]}}
    path.write_text(json.dumps({"results": results}))
    assert claims.CLAIMS[13].on_gpus(tmp_path) == f"2x, 4x ({path.name})"


def test_one_row_has_its_formula_and_sources(capsys):
    assert claims.main(["--row", "19"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^predicted +1\.87x$", output, re.MULTILINE)
    assert "formula" in output and "source" in output
    with pytest.raises(SystemExit):
        claims.main(["--row", "25"])
    assert "--row 25: there are 1 to 24" in capsys.readouterr().err


@pytest.mark.long
def test_figures_are_drawn_and_shown_on_the_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert claims.main(["--figures", str(tmp_path)]) == 0
    drawn = [*map(Path, capsys.readouterr().out.split())]
    assert len(drawn) == len(claims_figures.FIGURES)
    assert all(f"figures/{path.name}" in PAGE.read_text() for path in drawn)
    plot.draw(tmp_path / "overview.png")
    for path in (*drawn, tmp_path / "overview.png"):
        assert path.stat().st_size > 10_000 and (plot.FIGURES / path.name).is_file()


def test_a_layers_exchange_is_that_of_the_planner():
    """The layer's all-to-alls are those that the planner counts for a run of one layer."""
    shape, hardware = predictions.figure_14(16), predictions.A100
    alone = layer.layer_time(layer.LayerShape(16384, 2048, 2048, 32, gpus=1), hardware)
    exchange = layer.layer_time(shape, hardware) - alone
    size = 2 * 16384 * 2048 * 2
    part = size / 16 * 8 / (hardware.network_bandwidth * hardware.link_efficiency)
    assert exchange == pytest.approx(4 * (part + hardware.latency + 15 * hardware.message_overhead))
    assert layer.best_layer_time(shape, hardware) < layer.layer_time(shape, hardware)
