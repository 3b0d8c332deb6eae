"""Every benchmark at a tiny size: the record holds what the page of results quotes."""

import importlib
import json
import statistics
import sys

import pytest
import torch
from helpers import commands
from shapes import LayerShape

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import ExpertRows

PROGRAMS = sorted(path.stem for path in (commands.ROOT / "scripts" / "bench").glob("bench_*.py"))
SMALL = "--tokens 48 --model-dim 16 --hidden-dim 24 --experts 4 --repetitions 3"


def main(name):
    return importlib.import_module(f"bench_{name}").main


def rehearse(name, tmp_path, arguments):
    """The record of a run in this process."""
    path = tmp_path / f"{name}.json"
    assert main(name)(["--output", str(path), *arguments.split()]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def launch(name, tmp_path, arguments):
    """The record of a run on two ranks of this CPU."""
    path = tmp_path / f"{name}.json"
    launcher = ["-m", "fairseq_tutel.launch", "--nproc-per-node", "2", "--bind", "none", "--"]
    program = [sys.executable, f"scripts/bench/bench_{name}.py", "--output", str(path)]
    commands.run([sys.executable, *launcher, *program, *arguments.split()], timeout=120)
    return json.loads(path.read_text(encoding="utf-8"))


def check_point(found):
    """Percentiles are of the raw times, ratios of pairs within their intervals."""
    raw = {name: of.get("both", of["forward"]) for name, of in found["raw_ms"].items()}
    first = next(iter(raw.values()))
    for name, times in raw.items():
        ms = found["ms"][name].get("both", found["ms"][name]["forward"])
        assert ms["min"] <= ms["p20"] <= ms["p50"] <= ms["p80"]
        assert ms["p50"] == pytest.approx(statistics.median(times), rel=1e-3)
    for name, (low, middle, high) in found["this_over"].items():
        pairs = [a / b for a, b in zip(first, raw[name], strict=True)]
        assert low <= middle <= high and middle == pytest.approx(statistics.median(pairs), rel=1e-3)


def test_predictions(monkeypatch):
    """Products and bytes by hand; the review's estimate for meta-1.1t on an H200."""
    import predict
    from shapes import PRESETS

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop())
    names = ["NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA B200", "AMD Instinct MI300X", "RTX"]
    found = [predict.rates_of(torch.device("cuda", 0)) for _ in list(names)]
    assert found[0] is None and all(found[1:])
    assert predict.rates_of(torch.device("cpu")) is None and predict.beside(2.0, None) == {}
    h200 = found[-1]
    assert h200.half_flops == pytest.approx(0.78 * 989e12)
    assert h200.stream == pytest.approx(0.8 * 4.8e12)
    ms = predict.layer_ms(PRESETS["meta-1.1t"].shape, h200)
    rows = 49152  # 512 ranks x 96 slots
    assert ms["products"] == pytest.approx(1e3 * 12 * rows * 4096 * 16384 / (0.78 * 989e12))
    assert 1.08 < ms["triton"] / ms["products"] < 1.13
    assert ms["products"] < ms["experts"] < ms["triton"] < ms["dense"]
    assert predict.beside(3.0, 2.0) == {"predicted ms": 2.0, "measured/predicted": 1.5}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_what_a_good_result_is(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and "Good" in printed and f"{name}.py" in printed


def test_layer(tmp_path, capsys):
    result = rehearse("layer", tmp_path, f"--device cpu {SMALL}")
    found = result["results"]["custom"]
    assert list(found["ms"]) == ["torch", "dense", "experts", "products"]
    check_point(found)
    assert found["rms_error_ratio"]["dense"] < 1e-5
    assert found["settings"]["capacity"] == 24
    assert {"date", "command", "hardware", "versions", "commit"} <= result.keys()
    assert result["goals"] == []  # they are of the presets
    assert "this/that" in capsys.readouterr().out


def test_layer_as_a_simulated_rank(tmp_path):
    words = f"--device cpu {SMALL} --simulated-ranks 2 --backends torch,dense,triton"
    found = rehearse("layer", tmp_path, words)["results"]["custom"]
    assert list(found["ms"]) == ["torch", "dense"] and "need a GPU" in found["not_run"]["triton"]
    assert found["settings"]["local_experts"] == 2 and found["rms_error_ratio"]["dense"] < 1e-5
    assert "SIMULATED rank of 2" in found["shape"]


def test_layer_without_room_or_capacity(tmp_path, monkeypatch):
    monkeypatch.setattr("dense_reference.available_memory", lambda device: 1000)
    found = rehearse("layer", tmp_path, f"--device cpu {SMALL}")["results"]["custom"]
    # 3 masks of 48 * 4 * 24 numbers of 4 bytes
    assert found["not_run"]["dense"].startswith("masks alone need 0.0 GB (computed)")
    found = rehearse("layer", tmp_path, "--device cpu --tiny --preset dropless-16")["results"]
    found = found["tiny-dropless-16"]
    assert "needs a capacity" in found["not_run"]["dense"] and "products" in found["this_over"]


def test_goals_of_a_preset():
    """They hold on the preset's own device, for the layer's first backend."""
    goals_of = importlib.import_module("bench_layer").goals_of
    over = {"dense": [0.1, 0.15, 0.2], "experts": [1.0, 1.1, 1.2]}
    found = goals_of("cpu", {"cpu": {"this_over": over}}, on_gpu=False)
    assert [(each["bound"], each["reached"]) for each in found] == [(0.2, True), (1.07, False)]
    assert goals_of("cpu", {"cpu": {"this_over": over}}, on_gpu=True) == []


def test_experts_alone_are_the_layers():
    """The baseline's loop returns what the layer's experts return, outputs and gradients."""
    cases = importlib.import_module("cases")
    inputs = cases.LayerInputs(LayerShape(48, 16, 24, 4), build_groups(4), torch.device("cpu"), 1)
    case = cases.make_case("experts", inputs, "torch")
    case.begin()
    outputs, grads = case.forward(0)
    torch.autograd.backward(outputs, grads)
    want = inputs.layer.experts(ExpertRows(inputs.rows[0]))
    want.backward(inputs.d_rows[0])
    torch.testing.assert_close(torch.stack(outputs), want)
    got = [leaf.grad for leaf in case.leaves() if leaf.grad is not None]
    experts = inputs.layer.experts
    for whole in (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias):
        for grad in whole.grad:
            assert any(g.shape == grad.shape and torch.allclose(g, grad, atol=1e-5) for g in got)


def test_layer_over_tokens(tmp_path):
    found = rehearse("layer", tmp_path, "--mode curve --tiny --device cpu")["results"]
    assert list(found) == ["32 tokens", "64 tokens"]
    for point in found.values():
        check_point(point)
        derived = point["derived"]["dense"]
        pairs = zip(*(point["raw_ms"][case]["both"] for case in ("dense", "torch")), strict=True)
        longer = statistics.median(dense / this for dense, this in pairs)
        assert derived["times longer"] == pytest.approx(longer, rel=1e-3)
        assert derived["predicted"] > 1


def test_layer_in_evaluation(tmp_path):
    words = f"--device cpu --mode eval --eval-tokens 2,80 {SMALL}"
    results = rehearse("layer", tmp_path, words)["results"]
    assert list(results) == ["2 tokens", "80 tokens"]
    for found in results.values():
        assert set(found["not_run"]) == {"meta", "tutel"}
        assert {"int8", "dense", "flop-matched"} <= set(found["this_over"])
        check_point(found)


def test_steps_of_a_layer(tmp_path):
    results = rehearse("layer", tmp_path, "--device cpu --tiny --mode decode")["results"]
    assert [row["tokens"] for row in results.values()] == [1, 8]
    for found in results.values():
        assert found["derived"]["eager"]["over reading of weights"] > 0
        assert found["ms"]["eager"]["wall"]["p50"] > 0
        assert found["not_run"] == {"captured": "CUDA graphs need a GPU"}


def test_memory_of_a_layer(tmp_path):
    results = rehearse("memory", tmp_path, "--device cpu --tiny")["results"]
    for network, share in (("ffn", 0.5), ("swiglu", 0.6)):
        kept = {name: row["kept over fast"] for name, row in results[network]["derived"].items()}
        assert kept["lean"] < share and kept["minimal"] < 0.1 and kept["checkpoint"] == 0
        assert kept["lean fp8"] < kept["lean bf16"] < kept["lean"]


SHAPES = [LayerShape(96, 8, 32, experts=6, top_k=1), LayerShape(64, 16, 24, 4, dtype="bfloat16")]


@pytest.mark.parametrize("shape", SHAPES)
def test_fewest_bytes_are_those_of_inputs_and_outputs(shape):
    """By formula, against the operators' tensors; empty rows and one of two maps are not read."""
    bench_kernels = importlib.import_module("bench_kernels")

    def size(value):
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(map(size, value)) if isinstance(value, list | tuple) else 0

    kernels, full = bench_kernels.make_kernels(shape, torch.device("cpu"), seed=1, sets=1)
    found = {each.name: each for each in kernels}
    _, row, pair = found["dispatch"].inputs[0]
    assert full == (pair >= 0).double().mean().item() and 0.5 < full < 1
    empty = int((pair < 0).sum()) * shape.model_dim * found["combine"].inputs[0][0].itemsize
    unread = {"dispatch": size(row), "dispatch bwd": empty, "combine": size(pair) + empty,
              "combine bwd": size(row) + empty}  # fmt: skip
    for name, fewest in bench_kernels.fewest_bytes(shape, full).items():
        inputs = found[name].inputs[0]
        moved = size(inputs) + size(found[name].call(*inputs)) - unread.get(name, 0)
        assert moved == fewest, name


def test_kernels(tmp_path):
    found = rehearse("kernels", tmp_path, "--device cpu --tiny")["results"]["tiny-cpu"]
    copy = found["ms"]["copy"]["forward"]["p50"] / (2 * (256 << 20))
    for name, derived in found["derived"].items():
        share = derived["bytes"] * copy / found["ms"][name]["forward"]["p50"]
        assert derived["share of copy"] == pytest.approx(share, rel=1e-3)
    assert found["derived"]["assign_slots (torch)"]["times faster than torch"] > 0


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


@pytest.mark.parametrize("processes", [1, 2])
def test_peers(tmp_path, processes):
    (tmp_path / "tutel").mkdir()
    (tmp_path / "tutel" / "__init__.py").touch()
    (tmp_path / "tutel" / "moe.py").write_text(_TUTEL, encoding="utf-8")
    words = f"--device cpu --tiny --shapes base,top8 --repetitions 7 --processes {processes}"
    result = rehearse("peers", tmp_path, f"{words} --tutel {tmp_path}")
    peers = ("experts", "tutel", "tutel dropless")
    assert set(result["results"]) == {f"{s}: {p}" for s in ("base", "top8") for p in peers}
    found = result["results"]["top8: tutel"]
    missing = ("meta", "meta+tutel", "mixtral")
    left_out = result["results"]["top8: experts"]["not_run"]
    assert left_out == dict.fromkeys(missing, "no folder was given") and not found["not_run"]
    assert "tutel" in result["peers"] and set(found["ms"]) == {"padded", "tutel"}
    ratios = []
    for raw in found["raw_ms"] if processes > 1 else [found["raw_ms"]]:
        pairs = zip(raw["padded"]["both"], raw["tutel"]["both"], strict=True)
        ratios.append([mine / theirs for mine, theirs in pairs])
    if processes > 1:
        assert len(ratios) == processes
        ratios = [[statistics.median(pairs) for pairs in ratios]]
    low, middle, high = found["this_over"]["tutel"]  # of fewer than 8 values: their range
    assert [low, high] == pytest.approx([min(ratios[0]), max(ratios[0])], rel=1e-3)
    assert middle == pytest.approx(statistics.median(ratios[0]), rel=1e-3)
    assert found["derived"]["tutel"]["not slower"] is (high < 1.02)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return rehearse("train", tmp_path_factory.mktemp("train"), "--device cpu --tiny")


def test_training(training):
    found = training["results"]["moe+dense+flop-matched"]
    check_point(found)
    for name, derived in found["derived"].items():
        speed = 1e3 * 32 / found["ms"][name]["forward"]["p50"]
        assert derived["tokens/s"] == pytest.approx(speed, rel=1e-3)
    assert training["goals"] == []  # they hold for the preset, not for overrides
    # the same seeds and batches: both are the same model; fairseq logs three digits
    losses = found["losses"]
    assert losses["moe"] == pytest.approx(losses["dense"], abs=2e-3) and len(losses["moe"]) == 3
    assert losses["moe"] != pytest.approx(losses["flop-matched"], abs=2e-3)


def test_training_goals_are_of_tokens_per_second():
    bench_train = importlib.import_module("bench_train")
    speeds = {"moe": 95.0, "flop-matched": 100.0, "dense": 40.0}
    points = {name: {"derived": {name: {"tokens/s": speed}}} for name, speed in speeds.items()}
    found = bench_train.goals_of(bench_train.PRESETS["x4"], points)
    assert [(each["ratio"], each["reached"]) for each in found] == [(0.95, True), (2.375, True)]


def test_training_leaves_out_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("dense_reference.available_memory", lambda device: 1000)
    result = rehearse("train", tmp_path, "--device cpu --tiny --one-by-one")
    assert list(result["results"]) == ["moe", "flop-matched"]
    assert "0.0 GB are available" in result["not_run"]["dense"]


@pytest.mark.long
def test_training_on_two_ranks(tmp_path):
    """A preset of one simulated rank becomes one of real ranks."""
    words = "--device cpu --preset meta-8gpu-rank --tiny --variants moe"
    result = launch("train", tmp_path, words)
    assert (result["world_size"], result["settings"]["experts"]) == (2, 4)
    assert result["settings"]["simulated_ranks"] == 0


def test_generation(tmp_path):
    words = """--layers 2 --model-dim 16 --hidden-dim 24 --experts 4 --vocabulary 60 --steps 3
        --repetitions 2 --grid 1x1,2x2 --cases dense,int8,flop-matched,meta"""
    results = rehearse("generate", tmp_path, words)["results"]
    assert list(results) == ["1x1", "2x2"]
    for found in results.values():
        assert set(found["ms"]) == {"layer", "dense", "int8", "flop-matched"}
        assert set(found["not_run"]) == {"meta"}
        size = {name: of.get("weights MiB") for name, of in found["derived"].items()}
        assert size["int8"] < size["layer"] and size["flop-matched"] < size["layer"]
        step = found["ms"]["layer"]["forward"]["p50"] / 4
        assert found["derived"]["layer"]["ms per step"] == pytest.approx(step, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["small", "small-32"])  # fp32; bf16 of autocast
def test_swin(preset, tmp_path):
    result = rehearse("swin", tmp_path, f"--device cpu --preset {preset} --tiny --images 2")
    assert list(result["results"]) == ["inference, 2 images", "training, 2 images"]
    for found in result["results"].values():
        assert list(found["this_over"]) == ["dense formulation", "dense model"]
        assert 0.5 < found["this_over_masks_by_operations"] < 1
        if preset == "small":
            assert found["rms_error_ratio"] < 1e-5
    assert result["parameters"]["sparse"] > result["parameters"]["dense model"]


def test_operations_of_swins_masks():
    """Against a count by hand: two products of each mask in inference, five in training."""
    bench_swin = importlib.import_module("bench_swin")
    preset = bench_swin.Preset("for a test", "tiny", 4, (2,))
    config, models = bench_swin.build_models(preset, torch.device("cpu"), tiny=True, seed=1)
    layers = bench_swin.sparse_layers(config, 4)
    masks = sum(2 * s.tokens * s.experts * s.capacity * s.model_dim for s in layers)
    experts = sum(4 * s.experts * s.capacity * s.model_dim * s.hidden_dim for s in layers)
    for mode, products, passes in (("inference", 2, 1), ("training", 5, 3)):
        names = (bench_swin.OURS, bench_swin.MASKS)
        how = (config, 4, mode, "float32")
        pair = [bench_swin.make_case(name, models[name], *how) for name in names]
        ratio = bench_swin.counted_ratio(*pair, layers, mode)
        # ratio = own / (own + products of the masks); outer products add 1 / C of one to each
        own = products * masks * ratio / (1 - ratio)
        assert own > passes * experts
        dense = bench_swin.counted_ratio(pair[0], pair[0], layers, mode)
        assert dense == 1 and ratio < 1


def test_alltoall(tmp_path):
    words = "--device cpu --sizes 1K,256K --wires same,fp8 --iterations 2 --repetitions 2"
    result = launch("alltoall", tmp_path, words)
    assert (result["world_size"], result["backend"]) == (2, "gloo")
    assert [found["bytes"] for found in result["results"].values()] == [1024, 256 << 10]
    for found in result["results"].values():
        assert set(found["ms"]) == {"linear", "linear fp8", "2dh", "2dh fp8"}
        for name, derived in found["derived"].items():
            speed = found["bytes"] / (1e6 * found["ms"][name]["wall"]["p50"])
            assert derived["algbw GB/s"] == pytest.approx(speed, rel=1e-3)
            assert derived["busbw GB/s"] == pytest.approx(speed / 2, rel=1e-3)


def test_steps_at_a_forced_load(tmp_path):
    words = "--mode load --utilisation 60,90 --tokens 500 --model-dim 8 --hidden-dim 8"
    (found,) = launch("steps", tmp_path, f"{words} --repetitions 2")["results"].values()
    assert (
        list(found["derived"]) == ["60 %", "90 %"] and found["derived"]["60 %"]["times faster"] == 1
    )
    for percent in (60, 90):
        derived = found["derived"][f"{percent} %"]
        assert derived["utilisation %"] == pytest.approx(percent, abs=1)


@pytest.mark.long
def test_steps_by_exchange_and_by_r(tmp_path):
    (found,) = launch("steps", tmp_path, "--mode share --tiny --experts 4")["results"].values()
    raw = {name: of["both"] for name, of in found["raw_ms"].items()}
    for name, derived in found["derived"].items():
        for column, rest in (("communication", "linear, fp32"), ("links alone", name)):
            pairs = zip(raw[f"{rest}, copies"], raw[name], strict=True)
            share = 1 - statistics.median(copies / step for copies, step in pairs)
            assert derived[f"{column} %"] == pytest.approx(100 * share, abs=0.1)
    words = "--mode r --tiny --experts 1 --top-k 1 --factors 1,2"
    results = launch("steps", tmp_path, words)["results"]
    assert list(results) == ["f=1", "f=2"]
    for found in results.values():
        assert set(found["derived"]) == {"r=0", "r=1", "r=2"} == set(found["ms"])
        assert found["derived"]["r=1"] == {"times faster than r=1": 1, "predicted": 1}


@pytest.mark.long
def test_exchanges_and_the_tuner(tmp_path):
    words = "--device cpu --mode tuner --phases 1,2 --steps 5 --repetitions 1"
    result = launch("alltoall", tmp_path, words)
    results = result["results"]
    assert list(results) == ["fixed, f=1", "fixed, f=2", "phase 1, f=1", "phase 2, f=2"]
    # two ranks of one node, experts whole
    expected = {f"linear x{degree} r=1" for degree in (1, 2, 4, 8)} | {"linear x1 r=0"}
    for factor in (1, 2):
        fixed, phase = results[f"fixed, f={factor}"], results[f"phase {factor}, f={factor}"]
        assert set(fixed["ms"]) == expected
        best = min(expected, key=lambda name: fixed["ms"][name]["forward"]["p50"])
        assert list(fixed["derived"]) == [best] == [phase["derived"]["best"]["choice"]]
        assert phase["derived"]["tuner"]["choice"] in expected
        for name, derived in phase["derived"].items():
            raw = phase["raw_ms"][name]["forward"]
            assert len(raw) == 5 and derived["s"] == pytest.approx(1e-3 * sum(raw), rel=1e-3)
    assert [goal["bound"] for goal in result["goals"]] == [1.10, 1.2]


def test_goals_of_the_tuner():
    goals_of = importlib.import_module("bench_alltoall").tuner_goals
    fixed = {"a": 100.0, "b": 400.0}
    ms = {name: {"forward": {"p50": time}} for name, time in fixed.items()}
    phase = {"derived": {"tuner": {"s": 1.1}, "best": {"s": 1.0}}}
    results = {"fixed, f=1": {"ms": ms}, "phase 1, f=1": phase}
    assert goals_of(results, [1.0, 1.0], 10) == []  # the second phase is missing
    found = goals_of({**results, "phase 2, f=1": phase}, [1.0, 1.0], 10)
    assert [goal["ratio"] for goal in found] == pytest.approx([1.1, 8.0 / 2.2])


@pytest.mark.parametrize(
    "name, arguments, message",
    [
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
        ("alltoall", "--mode adaptive", "--mode adaptive"),
    ],
)
def test_refusals(capsys, monkeypatch, name, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(name)(["--device", "cpu", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_balance(tmp_path):
    rows = rehearse("balance", tmp_path, "--mode count --tokens 64")["results"]
    assert {row["ranks"] for row in rows} == {4, 8, 16, 64}
    assert all(row["after"] <= 1.05 for row in rows)
    given = f"{SMALL} --threads 1 --min-rows 1 --utilisations 50"
    result = launch("balance", tmp_path, given)
    found = result["results"]["50 %"]
    check_point(found)
    assert found["loads"] == [96, 96] and found["rows_helped"] == 96 and found["bytes_moved"] > 0
    assert len(result["goals"]) == 3
