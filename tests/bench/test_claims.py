"""The published claims: the command, its page, its measured values, its verdicts."""

import json
import re
from pathlib import Path

import claims
import claims_figures
import claims_layer as layer
import claims_predictions as predictions
import pytest

ROOT = Path(__file__).parents[2]
PAGE = claims.RESULTS / "README.md"


def test_measured_values_are_those_of_the_files():
    for claim in claims.CLAIMS.values():
        for entry in claim.measured:
            found = claims.read_value(entry, claims.RESULTS / entry["file"])
            assert found == pytest.approx(entry["value"], rel=1e-3), (claim, entry["file"])


def test_tests_that_claims_name_exist():
    for claim in claims.CLAIMS.values():
        path, _, name = claim.test.partition("::")
        text = (ROOT / path).read_text() if path else ""
        assert not name or f"def {name}(" in text, claim


def test_the_file_is_the_commands_output_and_the_page_counts_verdicts(capsys):
    assert claims.main([]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1 + len(claims.CLAIMS) + 2
    written = (claims.RESULTS / "claims.txt").read_text()
    assert output == written, "python scripts/bench/claims.py > scripts/bench/results/claims.txt"
    within, better, there, not_reached = re.findall(r"(\d+) (?!%)", output.splitlines()[-1])
    page = " ".join(PAGE.read_text().split())
    counts = f"{within} are within 15 %, {better} is better, {there} have no figure"
    assert counts in page and f"and {not_reached} are not reached" in page
    missed = [each for each in claims.CLAIMS.values() if each.verdict() == claims.NOT]
    assert len(claims.CLAIMS) == 24 and len(missed) <= 7
    assert all(claim.reason for claim in missed)  # who falls short says why


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
def test_figures_have_predicted_lines_published_points_and_those_of_a_ladder(tmp_path):
    ladder = tmp_path / "ladder"
    ladder.mkdir()

    def write(name, results):
        (ladder / name).write_text(json.dumps({"world_size": 16, "results": results}))

    both = {name: {"both": {"p50": ms}} for name, ms in (("torch", 10.0), ("dense", 50.0))}
    write("layer-16.json", {"custom": {"ms": both}})
    tokens = {"moe": {"tokens/s": 9e4}, "dense": {"tokens/s": 3e4}}
    write("train-16.json", {name: {"derived": {name: of}} for name, of in tokens.items()})
    wall = {"linear": {"wall": {"p50": 6.0}}, "2dh": {"wall": {"p50": 2.0}}}
    speeds = {"linear": {"busbw GB/s": 1.5}, "2dh": {"busbw GB/s": 4.5}}
    message = {"64": {"bytes": 64, "ms": wall, "derived": speeds}}
    write("alltoall-16.json", message)
    write("alltoall-unbound-16.json", message)
    (ladder / "layer-notes.json").write_text("{}")
    found = {}
    for name, make in claims_figures.FIGURES.items():
        figure = make(claims.CLAIMS, ladder)
        kind = "MEASURED" if name == "layer-tokens" else "PREDICTED"
        assert figure.title.startswith(kind)
        lines = {label: list(points) for label, points, _ in figure.lines}
        found[name] = {label: points for label, points in lines.items() if "cluster" in label}
        assert sum("predicted" in label for label in lines)
    measured = {name: [points for points in of.values()] for name, of in found.items()}
    assert measured == {
        "layer-speedup": [[(16, 5.0)]],
        "layer-time": [[(16, 50.0)], [(16, 10.0)]],
        "alltoall-bandwidth": [[(64, 1.5)], [(64, 4.5)]] * 2,
        "tokens-1.1t": [[(16, 9e4)], [(16, 3e4)]],
        "2dh": [[(16, 3.0)]],
        "layer-tokens": [],
    }


@pytest.mark.long
def test_figures_are_drawn_and_shown_on_the_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert claims.main(["--figures", str(tmp_path)]) == 0
    drawn = capsys.readouterr().out.split()
    assert len(drawn) == len(claims_figures.FIGURES)
    for path in map(Path, drawn):
        assert path.stat().st_size > 10_000
        assert (ROOT / "scripts" / "bench" / "results" / "figures" / path.name).is_file()
        assert f"figures/{path.name}" in PAGE.read_text()
    with pytest.raises(SystemExit):
        claims.main(["--figures", str(tmp_path), "--measured", str(tmp_path / "none")])
    assert "none: there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        claims.main(["--measured", str(tmp_path)])
    assert "--figures FOLDER, which is not given" in capsys.readouterr().err


def test_a_layers_exchange_is_that_of_the_planner():
    """The layer's all-to-alls are those that the planner counts for a run of one layer."""
    shape, hardware = predictions.figure_14(16), predictions.A100
    alone = layer.layer_time(layer.LayerShape(16384, 2048, 2048, 32, gpus=1), hardware)
    exchange = layer.layer_time(shape, hardware) - alone
    size = 2 * 16384 * 2048 * 2
    part = size / 16 * 8 / (hardware.network_bandwidth * hardware.link_efficiency)
    assert exchange == pytest.approx(4 * (part + hardware.latency + 15 * hardware.message_overhead))
    assert layer.best_layer_time(shape, hardware) < layer.layer_time(shape, hardware)
