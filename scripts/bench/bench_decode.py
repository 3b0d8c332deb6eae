"""A layer's step of generation on a GPU: launched one by one, or captured in a CUDA graph, and the
least time that reading the experts' weights takes.

    python scripts/bench/bench_decode.py --device cuda --preset decode

With all experts on one device the shapes of a step are static (K rows for each token, their counts
stay on the device), so that a graph holds it. A CPU has no graphs: there it is a rehearsal.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runner
import torch
from measure import Case, percentiles, time_cases
from presets import DTYPES
from ranks import Ranks
from record import device_name, goal, say, table
from runner import Report, command_line

from fairseq_tutel.moe import MoELayer

_NEAR_ROOFLINE, _FROM_TOKENS = 1.3, 8  # goal of captured steps, and tokens from which it holds


class Preset(NamedTuple):
    """Sizes of a layer, and numbers of tokens."""

    about: str
    model_dim: int
    hidden_dim: int
    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    dtype: str


PRESETS = {
    "decode": Preset(
        "2048/8192, 8 and 64 experts, top-2, bf16, 1 to 512 tokens",
        *(2048, 8192, (8, 64), (1, 8, 64, 512), "bfloat16"),
    )
}
_TINY = Preset("rehearsal", 16, 32, (4,), (1, 8), "float32")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PRESETS)
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="decode", help="default: decode")
    add("--repetitions", type=int, default=50, help="default: 50")
    add("--bandwidth", type=float, help="of memory, bytes/s (default: measured by a copy)")
    add("--output", type=Path, help="JSON file (default: runs/bench/decode-DEVICE.json)")
    return parser.parse_args(argv)


@torch.no_grad()
def captured(layer: MoELayer, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one call on ``x``; RuntimeError where something in it waits for the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled and tuned before
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    return graph


def weight_bytes(layer: MoELayer, x: torch.Tensor) -> int:
    """Of the experts that these tokens go to."""
    with torch.no_grad():
        _, aux = layer(x, return_aux=True)
    used = int((aux.num_kept_per_expert_E > 0).sum())
    return (
        used * sum(param.nbytes for param in layer.experts.parameters()) // layer.config.num_experts
    )


def bandwidth_of(device: torch.device, numel: int) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(numel, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    case = Case("copy", lambda _: ((target.copy_(source),), ()))
    times = time_cases([case], device, 10)["copy"]["forward"]
    return 2e3 * numel / percentiles(times)["p50"]


def measure(preset: Preset, experts: int, tokens: int, device, options, bandwidth: float) -> dict:
    """One number of experts and tokens."""
    torch.manual_seed(options.seed)
    with device:
        layer = MoELayer(preset.model_dim, experts, preset.hidden_dim, top_k=2, seed=1)
    layer = layer.to(device, DTYPES[preset.dtype]).eval()
    x = torch.randn(tokens, preset.model_dim, device=device, dtype=DTYPES[preset.dtype])

    @torch.no_grad()
    def eager(_):
        return (layer(x),), ()

    cases, missing = [Case("eager", eager)], {}
    if device.type == "cuda":
        try:
            graph = captured(layer, x)
            cases.append(Case("captured", lambda _: (graph.replay(), ((), ()))[1]))
        except RuntimeError as error:
            missing["captured"] = str(error).splitlines()[0]
    else:
        missing["captured"] = "CUDA graphs need a GPU"
    times = time_cases(cases, device, options.repetitions)
    least = 1e3 * weight_bytes(layer, x) / bandwidth
    ms = {name: percentiles(of["forward"]) for name, of in times.items()}
    over = {name: of["p50"] / least for name, of in ms.items()}
    return {"experts": experts, "tokens": tokens, "ms": ms, "roofline_ms": least,
            "over_roofline": over, "not_run": missing}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """A row for each size."""
    say(f"step of one layer in generation on {device_name(result)}")

    def time(name):
        return lambda row: f"{row['ms'][name]['p50']:.3f}" if name in row["ms"] else "-"

    shown = {"experts": "{experts}", "tokens": "{tokens}", "eager ms": time("eager"),
             "captured ms": time("captured"), "weights read, ms": "{roofline_ms:.4f}"}  # fmt: skip
    say(table(result["results"], shown))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    if ranks.world_size > 1:
        raise ValueError("one rank generates here")
    device = ranks.device
    preset = _TINY if options.tiny else PRESETS[options.preset]
    options.repetitions = 3 if options.tiny else options.repetitions
    bandwidth = options.bandwidth or bandwidth_of(device, (1 << 16) if options.tiny else (1 << 30))
    path = options.output or Path(f"runs/bench/decode-{device.type}.json")
    report = Report("decode", ranks, path, settings=preset._asdict(), bandwidth=bandwidth)
    results: list[dict[str, Any]] = []
    for experts in preset.experts:
        for tokens in preset.tokens:
            results.append(measure(preset, experts, tokens, device, options, bandwidth))
            report.keep(lambda: {"results": results})
    goals = [
        goal(
            f"captured, {row['experts']} experts, {row['tokens']} tokens: at most "
            f"{_NEAR_ROOFLINE} times the reading of the weights",
            *(row["over_roofline"]["captured"], _NEAR_ROOFLINE, True),
        )
        for row in results
        if "captured" in row["ms"] and row["tokens"] >= _FROM_TOKENS
    ]
    report.finish({"results": results, "goals": goals}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
