"""The published claims: the command, its page, its measured values, its verdicts."""

import re
from pathlib import Path

import pytest

from fairseq_tutel.plan import cli, layer
from fairseq_tutel.plan.claims import predictions, report
from fairseq_tutel.plan.claims.rows import CLAIMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "fairseq_tutel" / "plan" / "CLAIMS.md"


def test_measured_values_are_those_of_the_files():
    for number, entries in report.measured().items():
        for entry in entries:
            assert entry.read() == pytest.approx(entry.value, rel=1e-3), (number, entry.file)


def test_tests_that_claims_name_exist():
    for claim in CLAIMS:
        path, _, name = claim.test.partition("::")
        text = (ROOT / path).read_text() if path else ""
        assert not name or f"def {name}(" in text, claim


def test_the_page_has_the_commands_output(capsys):
    assert cli.main(["claims"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1 + len(CLAIMS) + 2
    assert output.strip() in PAGE.read_text()
    reached = sum(report.verdict(claim) != report.NOT for claim in CLAIMS)
    assert len(CLAIMS) == 24 and reached >= 16
    for claim in CLAIMS:  # who falls short says why
        assert report.verdict(claim) != report.NOT or claim.reason


def test_the_dense_formulation_is_planned_by_name(capsys):
    words = ["--config-name", "meta_1.1t", "gpus=8", "model.moe_expert_count=8"]
    assert cli.main(words) == cli.main([*words, "implementation=dense"]) == 0
    pattern = re.compile(r"^  predicted tokens/s +([\d,]+)", re.MULTILINE)
    speeds = pattern.findall(capsys.readouterr().out)
    this, dense = (float(speed.replace(",", "")) for speed in speeds)
    assert this / dense == pytest.approx(predictions.end_to_end_speedup(8), rel=0.01)
    assert cli.main([*words, "implementation=sparse"]) == 1
    assert "implementation=sparse: there is dense" in capsys.readouterr().err
    assert cli.main([*words[:2], "gpus=1", "model.moe_expert_count=8", "implementation=dense"]) == 1
    assert "on several GPUs, not for gpus=1" in capsys.readouterr().err


def test_one_row_has_its_formula_and_sources(capsys):
    assert cli.main(["claims", "--row", "19"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^predicted +1\.87x$", output, re.MULTILINE)
    assert "formula" in output and "source" in output
    with pytest.raises(SystemExit):
        cli.main(["claims", "--row", "25"])
    assert "--row 25: there are 1 to 24" in capsys.readouterr().err


def test_a_gpus_result_files_fill_the_column(tmp_path):
    (tmp_path / "layer-blog-8gpu-h200.json").write_text(
        '{"ratios": {"triton": {"dense/this both": 8.5}}}'
    )
    assert report.measured_on_gpus(1, tmp_path) == ["8.5 (layer-blog-8gpu-h200.json)"]
    assert report.measured_on_gpus(2, tmp_path) == []


def test_dispatch_grows_with_the_square():
    """The dense formulation's extra time grows with the square of the tokens, ours linearly."""
    hardware = predictions.a100()

    def time(tokens, **options):
        shape = layer.LayerShape(tokens, 1024, 4096, experts=16, gpus=1)
        return layer.layer_time(shape, hardware, **options)

    assert time(8192) == pytest.approx(2 * time(4096))
    extra = [time(tokens, dense=True) - time(tokens) for tokens in (4096, 8192)]
    assert extra[1] == pytest.approx(4 * extra[0])


def test_a_layers_exchange_is_that_of_the_planner():
    """The layer's all-to-alls are those that the planner counts for a run of one layer."""
    shape, hardware = predictions.figure_14(16), predictions.a100()
    alone = layer.layer_time(layer.LayerShape(16384, 2048, 2048, 32, gpus=1), hardware)
    exchange = layer.layer_time(shape, hardware) - alone
    size = 2 * 16384 * 2048 * 2
    part = size / 16 * 8 / (hardware.network_bandwidth * hardware.link_efficiency)
    assert exchange == pytest.approx(4 * (part + hardware.latency + 15 * hardware.message_overhead))
    assert layer.best_layer_time(shape, hardware) < layer.layer_time(shape, hardware)
