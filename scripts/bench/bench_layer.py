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
decode: a step of generation on a GPU, launched or captured in a CUDA graph. Good: a captured step
takes at most 1.3 times the reading of the experts' weights.
"""

import dataclasses
import sys
import traceback
from collections.abc import Iterator

import layers
import torch
from harness import Case, Goal, Point, agreement, call, peak_memory, sweep
from layers import CASES, PRESETS, Inputs, LayerShape, choose_shape, make_layer
from peers import EVALUATED, FOLDERS, evaluated_layers
from predict import beside, layer_ms, rates_of
from program import CLOCK, expect_known, numbers, program, words

from fairseq_tutel import ops
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

_WALL_TOKENS, _WALL_CALLS = 4096, 10  # up to so many tokens launches matter
_DECODE = LayerShape(1, 2048, 8192, experts=8, dtype="bfloat16")
_DECODE_EXPERTS = [8, 64]
_NEAR_ROOFLINE, _FROM_TOKENS = 1.3, 8  # goal of captured steps, and tokens from which it holds


def train_point(name, shape, names, options, ranks) -> Point:
    """Return forward and backward passes of some of CASES."""
    device, on_gpu, alone = ranks.device, ranks.device.type == "cuda", ranks.world_size == 1
    groups = build_groups(shape.experts, simulate_world_size=shape.simulated_ranks)
    layer = make_layer(shape, device, options.seed, groups=groups).train()
    inputs = Inputs(shape, device, options.seed, groups.rank)
    skipped = ranks.agree({name: layers.why_not_run(name, shape, device) for name in names})
    kept = [name for name in CASES if name in names and name not in skipped]
    cases = layers.make_cases(kept, layer, shape, inputs)
    sizes = {"capacity": shape.capacity, "local_experts": groups.num_local_experts}
    about = {"shape": str(shape), "settings": {**dataclasses.asdict(shape), **sizes}}
    memory: dict[str, int | None] = {}
    rates = rates_of(device) if alone else None
    predicted = layer_ms(shape, rates) if rates else {}

    def check(cases):
        whole = [case for case in cases if case.name not in layers.FLOORS]
        errors = agreement(whole, inputs.x, layers.AGREEMENT[shape.dtype])
        memory.update({case.name: peak_memory(case, device) for case in cases})
        return {"rms_error_ratio": errors}

    def derive(found):
        return {
            case: {"peak MiB": memory[case] and memory[case] / 2**20}
            | beside(phases["both"]["p50"], predicted.get(case))
            for case, phases in found["ms"].items()
        }

    # goals of a preset hold on the device that it is for
    own = PRESETS[name].at_most if name in PRESETS and name.startswith("cpu") != on_gpu else {}
    goals = [Goal(case, "this/that", bound, True) for case, bound in own.items()]
    return Point(name, cases, about, skipped, derive, goals, check)


def train(options, preset, ranks) -> None:
    """Measure one preset."""
    on_gpu = ranks.device.type == "cuda"
    name, shape = choose_shape(options, preset, ranks)
    names = options.backends or [case for case in CASES if on_gpu or case != "triton"]
    expect_known("backends", names, CASES)
    launches = on_gpu and shape.tokens <= _WALL_TOKENS and ranks.world_size == 1
    how = {"repetitions": 50 if on_gpu else 20, "calls": _WALL_CALLS if launches else 0}
    how |= {"file": f"layer-{name}-{ranks.device.type}", "about": {"preset": name}}
    sweep("layer", options, ranks, [train_point(name, shape, names, options, ranks)], **how)


def eval_points(shape, tokens, options, ranks) -> Iterator[Point]:
    """Yield all layers on each number of tokens."""
    names = options.backends or list(EVALUATED)
    expect_known("backends", names, EVALUATED)
    ops.set_backend("torch")
    torch.manual_seed(options.seed)
    shape = dataclasses.replace(shape, dtype="float32")
    layer = make_layer(shape, torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(options.seed)

    def case(name, run, x):
        return Case(name, call(lambda number: run(x[number % len(x)])))

    for count in tokens:
        of_tokens = dataclasses.replace(shape, tokens=count)
        made, missing = evaluated_layers(of_tokens, layer, ["layer", *names], options)
        x = torch.randn(3, count, shape.model_dim, generator=generator).unbind()
        yield Point(f"{count} tokens", [case(*each, x) for each in made.items()], {}, missing)


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
    """Return a call on so many tokens, and a copy of a large buffer for the memory's bandwidth."""
    weight, experts = layer.experts.fc1_weight, layer.config.num_experts
    x = torch.randn(tokens, weight.shape[-1], device=weight.device, dtype=weight.dtype)
    target = torch.empty_like(copied)
    cases = [Case("eager", call(lambda _: layer(x)))]
    missing = {}
    try:
        if not weight.is_cuda:
            raise RuntimeError("CUDA graphs need a GPU")
        graph = captured(layer, x)
        cases.append(Case("captured", call(lambda _: graph.replay())))
    except RuntimeError as error:
        missing["captured"] = str(error).splitlines()[0]
    cases.append(Case("copy", call(lambda _: target.copy_(copied))))
    with torch.no_grad():
        _, aux = layer(x, return_aux=True)
    used = float((aux.num_kept_per_expert_E > 0).double().mean())
    weights = used * sum(param.nbytes for param in layer.experts.parameters())
    about = {"experts": experts, "tokens": tokens, "weight_bytes": weights}
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

    goal = Goal("captured", "over reading of weights", _NEAR_ROOFLINE, True)
    goals = [goal] if tokens >= _FROM_TOKENS else []
    return Point(f"{experts} experts, {tokens}", cases, about, missing, derive, goals)


def decode_points(shape, tokens, options, ranks) -> Iterator[Point]:
    """Yield layers of few and many experts, on each number of tokens."""
    shape, size = (_DECODE.tiny(), 1 << 16) if options.tiny else (_DECODE, 1 << 30)
    copied = torch.ones(size, dtype=torch.uint8, device=ranks.device)
    for experts in [4] if options.tiny else _DECODE_EXPERTS:
        torch.manual_seed(options.seed)
        layer = make_layer(dataclasses.replace(shape, experts=experts), ranks.device).eval()
        for count in tokens:
            yield decode_point(layer, count, copied)


# mode -> points, numbers of tokens, those of a rehearsal, arguments of the sweep
OVER_TOKENS = {
    "eval": (eval_points, [1, 4, 16, 64, 256, 1024], [4, 16], {"repetitions": 100}),
    "decode": (decode_points, [1, 8, 64, 512], [1, 8], {"repetitions": 30, "calls": _WALL_CALLS}),
}
OPTIONS = {
    "mode": ("train", "what to measure", ("train", *OVER_TOKENS)),
    "preset": (words, "one after the other (default: meta-1.1t on a GPU, cpu on a CPU)", PRESETS),
    "backends": (words, f"cases of train ({', '.join(CASES)}) or eval ({', '.join(EVALUATED)})"),
    "eval-tokens": (numbers, "numbers of tokens in eval and decode"),
    "output": (str, "JSON file (default: in runs/bench); {preset} stands for the preset's name"),
    **layers.SIZES,
    **FOLDERS,
    **CLOCK,
}


def over_tokens(options, ranks) -> None:
    """Measure eval or decode, whose points differ in the number of tokens."""
    ranks.expect(several=False)
    name, shape = choose_shape(options, (options.preset or [None])[0], ranks)
    shape = dataclasses.replace(shape, simulated_ranks=0)
    if options.mode == "decode":  # which has sizes of its own
        name, shape = ranks.device.type, _DECODE
    points, usual, tiny, how = OVER_TOKENS[options.mode]
    tokens = options.eval_tokens or (tiny if options.tiny else usual)
    about = {"settings": dataclasses.asdict(shape), "clock": options.clock}
    found = points(shape, tokens, options, ranks)
    sweep(options.mode, options, ranks, found, file=f"{options.mode}-{name}", about=about, **how)


@program(__doc__, OPTIONS)
def main(options, ranks):
    """Measure one mode; exit code 1 if one of several presets failed."""
    if options.mode != "train":
        over_tokens(options, ranks)
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


if __name__ == "__main__":
    sys.exit(main())
