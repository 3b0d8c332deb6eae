"""Every benchmark at a tiny size on one rank: the record holds what the page of results quotes."""

import importlib

import pytest
from helpers.benchmarks import PROGRAMS, program, ratio, rehearse

pytestmark = pytest.mark.long

SMALL = "--device cpu --tokens 48 --model-dim 16 --hidden-dim 24 --experts 4 --repetitions 3"
TINY = "--device cpu --tiny"


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_what_a_good_result_is(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(name).main(["--help"])
    printed = capsys.readouterr().out
    assert "Good" in printed and f"{name}.py" in printed


def decoded(found):
    assert found["derived"]["eager"]["over reading of weights"] > 0


def kept(found):
    """Values that a layer keeps for its backward pass, over those of the mode fast."""
    share = {name: row["kept over fast"] for name, row in found["derived"].items()}
    assert share["lean"] < 0.6 and share["minimal"] < 0.1 and share["checkpoint"] == 0
    assert share["lean fp8"] < share["lean"]


def beside_a_copy(found):
    copy = found["ms"]["copy"]["forward"]["p50"] / (2 * (256 << 20))
    for name, derived in found["derived"].items():
        share = derived["bytes"] * copy / found["ms"][name]["forward"]["p50"]
        assert derived["share of copy"] == pytest.approx(share, rel=1e-3)


def trained(found):
    """The same seeds and batches: two are the same model; fairseq logs three digits."""
    for name, derived in found["derived"].items():
        want = 1e3 * 32 / found["ms"][name]["forward"]["p50"]
        assert derived["tokens/s"] == pytest.approx(want, rel=1e-3)
    losses = found["losses"]
    assert losses["moe"] == pytest.approx(losses["dense"], abs=2e-3) and len(losses["moe"]) == 3
    assert losses["moe"] != pytest.approx(losses["flop-matched"], abs=2e-3)


def generated(found):
    size = {name: of.get("weights MiB") for name, of in found["derived"].items()}
    assert size["int8"] < size["layer"] and size["flop-matched"] < size["layer"]
    step = found["ms"]["layer"]["forward"]["p50"] / 4
    assert found["derived"]["layer"]["ms per step"] == pytest.approx(step, rel=1e-3)


def same_outputs(found):
    assert found["rms_error_ratio"]["dense"] < 1e-5


def of_swin(found):
    assert 0.5 < found["this_over_masks_by_operations"] < 1 and found["rms_error_ratio"] < 1e-5


def counted(found):
    rows = found["derived"]
    assert rows["4 ranks, one expert"]["before"] == 4
    assert len(rows) == 21 and all(row["after"] <= 1.05 for row in rows.values())


# program and words -> points, timed cases, those that are left out, and a check of each point
SWIN = "inference, 2 images; training, 2 images"
RUNS = {
    f"layer {SMALL}": ("custom", "torch dense experts products", "", same_outputs),
    f"layer {SMALL} --simulated-ranks 2 --backends torch,dense,triton":
        ("custom", "torch dense", "triton", same_outputs),
    f"layer --mode eval --eval-tokens 2,80 {SMALL}":
        ("2 tokens; 80 tokens", None, "meta tutel", None),
    f"layer {TINY} --mode decode": (None, "copy eager", "captured", decoded),
    f"layer {TINY} --preset dropless-16": ("tiny-dropless-16", None, "dense", None),
    f"memory {TINY}": ("ffn; swiglu", None, "", kept),
    f"kernels {TINY}": ("tiny-cpu", None, None, beside_a_copy),
    f"train {TINY}": ("moe+dense+flop-matched", "moe dense flop-matched", "", trained),
    f"generate {TINY} --experts 4 --steps 3 --grid 1x1,2x2 --cases dense,int8,flop-matched,meta":
        ("1x1; 2x2", "layer dense int8 flop-matched", "meta", generated),
    f"swin {TINY} --preset small --images 2": (SWIN, None, None, of_swin),
    f"swin {TINY} --preset small-32 --images 2": (SWIN, None, None, None),  # bf16 of autocast
    "balance --mode count --tokens 64": ("busiest over mean", None, None, counted),
}  # fmt: skip


@pytest.mark.parametrize("words", RUNS)
def test_rehearsals(words, tmp_path):
    points, cases, left_out, check = RUNS[words]
    name, _, arguments = words.partition(" ")
    results = rehearse(name, tmp_path, arguments)["results"]
    assert points is None or list(results) == points.split("; ")
    for found in results.values():
        assert cases is None or set(found["ms"]) == set(cases.split())
        assert left_out is None or set(found["not_run"]) == set(left_out.split())
        if check:
            check(found)


@pytest.mark.interpreted
def test_products(tmp_path):
    """Every candidate, with rows that are written and gathered, in the interpreter."""
    results = rehearse("products", tmp_path, f"{TINY} --preset fine-128", phase="forward")[
        "results"
    ]
    of_tile = "16x16x16, 1 stages"
    ways = ["grouped_mm", "every GPU", of_tile]
    gathered = [f"gathered {way}" for way in ways]
    two = ["grouped_mm", of_tile]
    for what, want in (
        ("fc1", ways + gathered),
        ("fc2", ways),
        ("gradient of fc1", two + [f"gathered {way}" for way in two]),
    ):
        found = results[f"tiny-fine-128: {what}"]
        assert list(found["ms"]) == want and not found["not_run"]
        ms = {case: of["forward"]["p50"] for case, of in found["ms"].items()}
        over = found["derived"][want[-1]]["over grouped_mm"]
        torchs = "gathered grouped_mm" if want[-1].startswith("gathered") else "grouped_mm"
        assert over == pytest.approx(ms[want[-1]] / ms[torchs], rel=1e-2)


# what bench_peers uses of Tutel's interface
_TUTEL = """
import torch
class Layer(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y.l_aux = y.sum()
        return y
def moe_layer(gate_type, experts, model_dim):
    assert gate_type["capacity_factor"] in (0.0, 1.0) and experts["hidden_size_per_expert"] == 48
    return Layer(model_dim, model_dim)
"""


def test_peers(tmp_path):
    """Each of two processes measures as one does alone."""
    (tmp_path / "tutel").mkdir()
    (tmp_path / "tutel" / "__init__.py").touch()
    (tmp_path / "tutel" / "moe.py").write_text(_TUTEL, encoding="utf-8")
    result = rehearse("peers", tmp_path, f"{TINY} --shapes top8 --processes 2 --tutel {tmp_path}")
    results = {name.removeprefix("top8: "): found for name, found in result["results"].items()}
    assert set(results) == {"experts", "tutel", "tutel dropless"}
    assert set(results["experts"]["not_run"]) == {"meta", "meta+tutel", "mixtral"}
    found = results["tutel"]
    assert set(found["ms"]) == {"padded", "tutel"} and not found["not_run"]
    low, middle, high = found["this_over"]["tutel"]
    assert found["derived"]["tutel"]["not slower"] is (high < 1.02)
    # the range of the medians
    medians = [ratio(of["padded"]["both"], of["tutel"]["both"]) for of in found["raw_ms"]]
    wanted = [min(medians), sum(medians) / 2, max(medians)]
    assert len(medians) == 2 and [low, middle, high] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name, arguments, message", [
    ("layer", "--backends cuda", "--backends cuda"),
    ("layer", "--tokens 0", "--tokens 0"),
    ("layer", "--experts 6 --simulated-ranks 4", "6 experts"),
    ("layer", "--experts 4 --top-k 5", "top_k=5"),
    ("layer", "--preset huge", "--preset huge"),
    ("layer", "--tiny --clock processor --threads 2", "--clock processor: for one thread"),
    ("kernels", "--backends triton", "need a GPU"),
    ("train", "--variants moe,tutel", "tutel"),
    ("swin", "--tiny --images 0", "--images 0: at least 1"),
    ("swin", "--tiny --modes generation", "--modes generation"),
    ("generate", "--grid 8", "--grid 8"),
    ("alltoall", "", "at least 2 ranks"),
    ("steps", "--mode adaptive", "--mode adaptive"),
])  # fmt: skip
def test_refusals(capsys, monkeypatch, name, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        program(name).main(["--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err
