"""bench_swin: the model with this layer beside the dense formulation, and the work of both."""

import json
import re
from dataclasses import replace
from pathlib import Path

import bench_swin
import pytest
import torch
from bench_swin import DENSE_MODEL, MASKS, OURS
from swin_work import MASK_PRODUCTS, PASSES, example, expected_ratio, forward_macs, mask_macs
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "run_gpu.sh"
PRESET = bench_swin.SwinCase("for a test", "tiny", 4, (2,))


def counted(case):
    """Multiply-accumulates of one pass that torch's counter of its own operators sees."""
    case.begin()
    with FlopCounterMode(display=False) as counter:
        outputs, grads = case.forward(0)
        if grads:
            torch.autograd.backward(outputs, grads)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("mode", list(PASSES))
def test_work_is_what_torch_counts(mode):
    """The dense model's; the masks' products, as the difference that they make."""
    models = bench_swin.Models(PRESET, torch.device("cpu"), tiny=True, seed=1)
    of = {
        name: counted(bench_swin.make_case(name, models, 4, mode, "float32", 1))
        for name in (OURS, MASKS, DENSE_MODEL)
    }
    config = models.config
    dense = forward_macs(replace(config, num_experts=0), 4)
    # the first layer has no gradient of its input, attention's backward pass a product more
    assert of[DENSE_MODEL] == pytest.approx(PASSES[mode] * dense, rel=0.06)
    if mode == "inference":
        assert of[DENSE_MODEL] == pytest.approx(dense, rel=1e-6)
    extra = MASK_PRODUCTS[mode] * mask_macs(config, 4)
    # outer products of gate and slot add 1 / C of a product to each
    assert of[MASKS] - of[OURS] == pytest.approx(extra, rel=0.05)


def test_ratios_of_the_published_model():
    """By hand: 10 layers, 9 of 144 tokens x 384 and one of 36 x 768, 1.25 slots per token."""
    config = example("model").PRESETS["small"]
    config = replace(config, num_experts=8)
    assert mask_macs(config, 1) == 9 * 144 * 8 * 22 * 384 + 36 * 8 * 6 * 768
    assert forward_macs(config, 64) / 64 == pytest.approx(7.18e9, rel=2e-3)
    assert forward_macs(replace(config, num_experts=0), 64) / 64 < forward_macs(config, 64) / 64
    assert expected_ratio(config, 16, "inference") == pytest.approx(1.40, abs=0.01)
    assert expected_ratio(config, 16, "training") == pytest.approx(1.34, abs=0.01)
    assert expected_ratio(config, 64, "inference") == pytest.approx(2.62, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["small", "small-32"])  # fp32; bf16 of autocast
def test_a_rehearsal(preset, tmp_path):
    path = tmp_path / "swin.json"
    arguments = ["--device", "cpu", "--preset", preset, "--tiny", "--output", str(path)]
    assert bench_swin.main(arguments) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result["results"]
    assert [(row["mode"], row["images"]) for row in rows] == [
        (mode, images) for mode in PASSES for images in (2, 4)
    ]
    for row in rows:
        assert list(row["raw_ms"]) == [OURS, MASKS, DENSE_MODEL] and row["not_run"] == {}
        pairs = zip(row["raw_ms"][MASKS], row["raw_ms"][OURS], strict=True)
        least, most = sorted(theirs / mine for theirs, mine in pairs)
        ratio = row["faster_than_dense_formulation"]
        assert ratio["interval"] == pytest.approx([least, most], rel=1e-3)
        assert ratio["median"] == pytest.approx((least + most) / 2, rel=1e-3)
        assert row["expected"] > 1
        if preset == "small":
            assert row["rms_error_ratio"] < 1e-5
    assert result["parameters"]["sparse"] > result["parameters"]["dense model"]


def test_formulations_that_differ_are_not_timed(monkeypatch, tmp_path):
    models = bench_swin.Models(PRESET, torch.device("cpu"), tiny=True, seed=1)
    cases = [
        bench_swin.make_case(name, models, 2, "inference", "float32", 1) for name in (OURS, MASKS)
    ]
    assert bench_swin.agreement(cases, models, judged=True) < 1e-5
    wrong = replace(cases[1], forward=lambda number: ((2 * cases[1].forward(number)[0][0],), ()))
    with pytest.raises(RuntimeError, match="do not compute the same: RMS error ratio 0.5"):
        bench_swin.agreement([cases[0], wrong], models, judged=True)


def test_masks_without_room_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_swin, "available_memory", lambda device: 1000)
    path = tmp_path / "swin.json"
    arguments = ["--device", "cpu", "--tiny", "--images", "4", "--modes", "inference"]
    assert bench_swin.main([*arguments, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert "0.0 GB are available" in row["not_run"][MASKS]
    assert row["faster_than_dense_formulation"] is None and row["of_dense_model_time"]


@pytest.mark.parametrize("arguments, message", [
    (["--images", "0"], "--images 0: at least 1"),
    (["--modes", "generation"], "--modes generation"),
    (["--processor-time", "--threads", "2"], "--processor-time: for one thread of one rank"),
])  # fmt: skip
def test_refusals(capsys, arguments, message):
    assert bench_swin.main(["--device", "cpu", "--tiny", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_presets_of_run_gpu_exist():
    """The rehearsal of run_gpu.sh leaves these steps out, for its time."""
    named = re.findall(r"^ +bench \d+ swin (\S+)", SCRIPT.read_text(encoding="utf-8"), re.M)
    assert named and set(named) == set(bench_swin.PRESETS) - {"small"}
