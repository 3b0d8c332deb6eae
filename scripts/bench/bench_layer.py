"""Time and memory of one MoE layer, beside the dense formulation and its experts alone.

    python scripts/bench/bench_layer.py --preset cpu
    python scripts/bench/bench_layer.py --device cuda --preset meta-1.1t,fig14
    python scripts/bench/bench_layer.py --tokens 8192 --model-dim 512 --hidden-dim 2048 --experts 16
    python scripts/bench/bench_layer.py --mode eval --preset cpu-large --tutel DIR --meta DIR
    python scripts/bench/bench_layer.py --mode decode --device cuda

train: forward and backward. Good: a fifth of the dense formulation's time, and at most 1.1 times
that of the experts (CPU) or of their products (GPU). Several ranks use a real all-to-all: put
python -m fairseq_tutel.launch -- before the command. Up to 4096 tokens a GPU is also timed by the
wall clock, with launches. A known GPU also has predicted times (predict.py).
eval: forward only, 1 to 1024 tokens, beside Tutel's and Meta's layers. Good: at most their time.
curve: forward and backward over the number of tokens, beside the dense formulation, and on a CPU
beside the planner's formula. Good: the dense formulation takes as many times longer as planned.
decode: a step of generation on a GPU, launched or captured in a CUDA graph. Good: a captured step
takes at most 1.3 times the reading of the experts' weights.
"""

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases import (
    ABOUT,
    AGREEMENT,
    BACKENDS,
    EVALUATED,
    FLOORS,
    LayerInputs,
    make_case,
    make_layer,
    why_not_run,
)
from harness import (
    Case,
    Point,
    agreement,
    call,
    peak_memory,
    ratio_of_pairs,
    sweep,
    those_that_fit,
)
from peers import FOLDERS, evaluated_layers
from predict import beside, layer_ms, rates_of
from program import CLOCK, Ranks, Report, expect_known, goal, numbers, program, words
from record import ROOT
from shapes import DTYPES, PRESETS, SIZES, LayerShape, choose_shape

from fairseq_tutel import ops
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.plan import layer as plan
from fairseq_tutel.plan.hardware import load_hardware

_WALL_TOKENS, _WALL_CALLS = 4096, 10  # up to so many tokens launches matter
_CURVE_TOKENS = [512, 1024, 2048, 4096, 8192]
_EVAL_TOKENS = [1, 4, 16, 64, 256, 1024]
_DECODE = LayerShape(1, 2048, 8192, experts=8, dtype="bfloat16")
_DECODE_TOKENS, _DECODE_EXPERTS = [1, 8, 64, 512], [8, 64]
_NEAR_ROOFLINE, _FROM_TOKENS = 1.3, 8  # goal of captured steps, and tokens from which it holds
OPTIONS = {
    "mode": ("train", "train, eval, curve or decode"),
    "preset": (words, "one after the other (default: meta-1.1t on a GPU, cpu on a CPU)"),
    "backends": (words, f"cases of train ({', '.join(ABOUT)}) or eval ({', '.join(EVALUATED)})"),
    "repetitions": (0, "0: 20 on a CPU, 50 on a GPU, 100 in eval"),
    "eval-tokens": (numbers, "numbers of tokens in eval, curve and decode"),
    "output": (str, "JSON file; {preset} stands for the preset's name"),
    **SIZES,
    **FOLDERS,
    **CLOCK,
}


def possible_cases(
    names: list[str], inputs: LayerInputs, ranks: Ranks
) -> tuple[list[Case], dict[str, str]]:
    """The cases that run on every rank and find their memory, the layer first; the others."""
    reasons = {name: why_not_run(name, inputs.shape, ranks.device) for name in names}
    # on every rank or none: free memory differs, and all take part in an exchange
    anywhere = ranks.slowest([float(reason is not None) for reason in reasons.values()])
    skipped = {
        name: reason or "another rank cannot run it"
        for (name, reason), skip in zip(reasons.items(), anywhere, strict=True)
        if skip
    }
    kept = [name for name in ABOUT if name in names and name not in skipped]
    backend = next((name for name in kept if name in BACKENDS), "torch")
    cases = [make_case(name, inputs, backend) for name in kept]
    if ranks.world_size == 1:  # else all take part or none
        cases = those_that_fit(cases, ranks.device, skipped)
    return cases, skipped


def goals_of(preset: str, results: dict[str, Any], on_gpu: bool) -> list[dict]:
    """Goals of a preset, on the device that they are for."""
    if preset not in PRESETS or preset.startswith("cpu") == on_gpu or not results:
        return []
    over = results[preset]["this_over"]
    return [
        goal(f"at most {bound:g} times the time of: {ABOUT[case]}", over[case][1], bound, True)
        for case, bound in PRESETS[preset].at_most.items()
        if case in over
    ]


def train(options: argparse.Namespace, given: str | None, ranks: Ranks) -> None:
    """Measure forward and backward passes of one preset."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    name, shape = choose_shape(options, given, ranks)
    names = options.backends or [case for case in ABOUT if on_gpu or case != "triton"]
    expect_known("--backends", names, list(ABOUT))
    groups = build_groups(shape.experts, simulate_world_size=shape.simulated_ranks)
    inputs = LayerInputs(shape, groups, device, options.seed)
    cases, skipped = possible_cases(names, inputs, ranks)
    whole = [case for case in cases if case.name not in FLOORS]
    errors = agreement(whole, inputs.x, AGREEMENT[shape.dtype])
    memory = {case.name: peak_memory(case, device) for case in cases}
    sizes = {"capacity": shape.capacity, "local_experts": groups.num_local_experts}
    settings = {**dataclasses.asdict(shape), **sizes, "rows": shape.rows(ranks.world_size)}
    about = {"shape": str(shape), "settings": settings, "rms_error_ratio": errors}

    rates = rates_of(device) if ranks.world_size == 1 else None
    predicted = layer_ms(shape, rates) if rates else {}

    def derive(found):
        return {
            case: {"peak MiB": memory[case] and memory[case] / 2**20}
            | beside(phases["both"]["p50"], predicted.get(case))
            for case, phases in found["ms"].items()
        }

    launches = on_gpu and shape.tokens <= _WALL_TOKENS and ranks.world_size == 1
    how = {"calls": _WALL_CALLS if launches else 0, "warmup": 1 if options.tiny else 3}
    repetitions = 2 if options.tiny else options.repetitions or (50 if on_gpu else 20)
    path = options.output and Path(options.output.replace("{preset}", name))
    with Report("layer", ranks, path, f"layer-{name}-{device.type}", preset=name) as report:
        point = Point(name, cases, about, skipped, derive)
        goals = lambda results: goals_of(name, results, on_gpu)  # noqa: E731
        sweep(report, [point], ranks, repetitions, goals=goals, **how)


def curve_points(
    shape: LayerShape, counts: list[int], seed: int, device: torch.device
) -> Iterator[Point]:
    """This layer and the dense formulation on each number of tokens."""
    backend = "triton" if device.type == "cuda" else "torch"
    cpu = load_hardware(ROOT / "configs", "cpu")
    for tokens in counts:
        of_tokens = dataclasses.replace(shape, tokens=tokens)
        inputs = LayerInputs(of_tokens, build_groups(shape.experts), device, seed)
        cases = [make_case(name, inputs, backend) for name in (backend, "dense")]
        planned = plan.LayerShape(
            *(tokens, shape.model_dim, shape.hidden_dim, shape.experts, 1, shape.top_k),
            element=DTYPES[shape.dtype].itemsize,
        )
        this, dense = (plan.layer_time(planned, cpu, dense=dense) for dense in (False, True))
        predicted = {} if device.type == "cuda" else {"predicted": dense / this}

        def derive(found, predicted=predicted):
            longer = ratio_of_pairs(*(found["raw_ms"][c]["both"] for c in ("dense", backend)))
            return {"dense": {"times longer": longer[1], **predicted}}

        yield Point(f"{tokens} tokens", cases, {"tokens": tokens}, derive=derive)


def curve(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure forward and backward passes over the number of tokens."""
    ranks.expect_one()
    name, shape = choose_shape(options, (options.preset or [None])[0], ranks)
    shape = dataclasses.replace(shape, simulated_ranks=0)
    counts = options.eval_tokens or ([32, 64] if options.tiny else _CURVE_TOKENS)
    settings = dataclasses.asdict(shape)
    with Report("curve", ranks, options.output, f"curve-{name}", settings=settings) as report:
        points = curve_points(shape, counts, options.seed, ranks.device)
        sweep(report, points, ranks, 2 if options.tiny else options.repetitions or 7, warmup=1)


def eval_points(
    shape: LayerShape, counts: list[int], names: list[str], options: argparse.Namespace
) -> Iterator[Point]:
    """All layers on each number of tokens."""
    torch.manual_seed(options.seed)
    layer = make_layer(shape, torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(options.seed)

    def case(name, run, x):
        @torch.no_grad()
        def forward(number):
            return (run(x[number % len(x)]),), ()

        return Case(name, forward)

    for tokens in counts:
        of_tokens = dataclasses.replace(shape, tokens=tokens)
        made, missing = evaluated_layers(of_tokens, layer, ["layer", *names], options)
        x = torch.randn(3, tokens, shape.model_dim, generator=generator).unbind()
        yield Point(f"{tokens} tokens", [case(*each, x) for each in made.items()], {}, missing)


@torch.no_grad()
def captured(layer: MoELayer, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture one call on ``x``; RuntimeError if something in it waits for the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled and tuned before
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    return graph


def decode_point(layer: MoELayer, tokens: int, copied: torch.Tensor) -> Point:
    """A call on so many tokens, and a copy of a large buffer for the memory's bandwidth."""
    weight = layer.experts.fc1_weight
    x = torch.randn(tokens, weight.shape[-1], device=weight.device, dtype=weight.dtype)
    target = torch.empty_like(copied)
    eager = torch.no_grad()(lambda: layer(x))
    cases, missing = [Case("eager", call(eager))], {"captured": "CUDA graphs need a GPU"}
    if weight.is_cuda:
        missing.clear()
        try:
            cases.append(Case("captured", call(captured(layer, x).replay)))
        except RuntimeError as error:
            missing["captured"] = str(error).splitlines()[0]
    cases.append(Case("copy", call(lambda: target.copy_(copied))))
    with torch.no_grad():
        _, aux = layer(x, return_aux=True)
    used = float((aux.num_kept_per_expert_E > 0).double().mean())
    weights = used * sum(param.nbytes for param in layer.experts.parameters())
    about = {"experts": layer.config.num_experts, "tokens": tokens, "weight_bytes": weights}
    rates = rates_of(weight.device)

    def derive(found):
        # a copy reads and writes
        reading = found["ms"]["copy"]["forward"]["p50"] * weights / (2 * copied.nbytes)
        ms = {name: of["forward"]["p50"] for name, of in found["ms"].items() if name != "copy"}
        predicted = rates and rates.bytes_ms(weights)
        return {
            name: {"over reading of weights": of / reading} | beside(of, predicted)
            for name, of in ms.items()
        }

    return Point(f"{layer.config.num_experts} experts, {tokens}", cases, about, missing, derive)


def decode_points(options: argparse.Namespace, device: torch.device) -> Iterator[Point]:
    """Layers of few and many experts, on each number of tokens."""
    shape = _DECODE.tiny() if options.tiny else _DECODE
    copied = torch.ones(1 << (16 if options.tiny else 30), dtype=torch.uint8, device=device)
    for experts in [4] if options.tiny else _DECODE_EXPERTS:
        torch.manual_seed(options.seed)
        layer = make_layer(dataclasses.replace(shape, experts=experts), device)
        layer = layer.to(DTYPES[shape.dtype]).eval()
        for tokens in options.eval_tokens or ([1, 8] if options.tiny else _DECODE_TOKENS):
            yield decode_point(layer, tokens, copied)


def decode_goals(results: dict[str, Any]) -> list[dict]:
    """Goals of captured steps."""
    return [
        goal(
            f"captured, {name} tokens: at most {_NEAR_ROOFLINE} times the reading of the weights",
            *(of["derived"]["captured"]["over reading of weights"], _NEAR_ROOFLINE, True),
        )
        for name, of in results.items()
        if "captured" in of["derived"] and of["tokens"] >= _FROM_TOKENS
    ]


def forward_only(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure evaluation, or steps of generation."""
    ranks.expect_one()
    repetitions = 3 if options.tiny else options.repetitions
    if options.mode == "decode":
        path = options.output, f"decode-{ranks.device.type}"
        with Report("decode", ranks, *path) as report:
            points, how = decode_points(options, ranks.device), {"calls": _WALL_CALLS}
            sweep(report, points, ranks, repetitions or 30, goals=decode_goals, **how)
        return
    ops.set_backend("torch")
    names = options.backends or list(EVALUATED)
    expect_known("--backends", names, list(EVALUATED))
    name, shape = choose_shape(options, (options.preset or [None])[0], ranks)
    shape = dataclasses.replace(shape, simulated_ranks=0, dtype="float32")
    counts = options.eval_tokens or ([4, 16] if options.tiny else _EVAL_TOKENS)
    about = {"about": EVALUATED, "settings": dataclasses.asdict(shape), "clock": options.clock}
    with Report("layer-eval", ranks, options.output, f"layer-eval-{name}", **about) as report:
        points = eval_points(shape, counts, names, options)
        sweep(report, points, ranks, repetitions or 100, clock=options.clock)


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """Measure one mode; exit code 1 if one of several presets failed."""
    expect_known("--mode", [options.mode], ["train", "eval", "curve", "decode"])
    if options.mode == "curve":
        curve(options, ranks)
        return 0
    if options.mode != "train":
        forward_only(options, ranks)
        return 0
    presets, failed = options.preset or [None], False
    several = len(presets) > 1
    if several and options.output and "{preset}" not in options.output:
        raise ValueError(f"--output {options.output}: several presets need {{preset}} in it")
    for preset in presets:
        try:
            train(options, preset, ranks)
        except Exception:
            if not several or ranks.world_size > 1:
                raise
            traceback.print_exc()  # the next shape may run
            failed = True
    return int(failed)


main = program(__doc__, OPTIONS, run, PRESETS)


if __name__ == "__main__":
    sys.exit(main())
