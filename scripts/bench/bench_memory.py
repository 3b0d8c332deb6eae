"""Memory and time of one MoE layer, by ``activation_memory``, beside a checkpointed layer.

    python scripts/bench/bench_memory.py --preset cpu
    python scripts/bench/bench_memory.py --device cuda --preset meta-1.1t
    sudo python scripts/bench/two_nodes.py --ranks 2 --rate 1gbit -- \
        python scripts/bench/bench_memory.py --tokens 2048 --experts 8 --overlap 4

Kept are the bytes of storages that autograd keeps, each once, without parameters and input. Good:
lean keeps half (gated: 0.6) and takes at most 1.05 times the time; minimal keeps a tenth and takes
at most 1.4 times.
"""

import argparse
import dataclasses
import sys
from functools import partial

import torch
from cases import make_layer
from harness import Case, Point, sweep
from program import Ranks, Report, expect_known, goal, program, words
from shapes import DTYPES, PRESETS, SIZES, LayerShape, choose_shape
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.config import ExchangeConfig

NETWORKS = {"ffn": 0.5, "swiglu": 0.6}  # and what lean may keep
OPTIONS = {
    "preset": (str, "a preset of bench_layer.py (default: meta-1.1t on a GPU, cpu on a CPU)"),
    "networks": (words, f"of the experts (default: {','.join(NETWORKS)})"),
    "overlap": (1, "chunks in which rows travel between ranks"),
    "repetitions": (20, "passes of each case"),
    "output": (str, "JSON file"),
    **SIZES,
}


def kept_bytes(case: Case, leaves: list[torch.Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps, but for those of ``leaves``."""
    sizes, alive = {}, []  # a storage that is freed may come again

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.forward(0)
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


def memory_point(
    shape: LayerShape, network: str, device: torch.device, seed: int, **options: object
) -> Point:
    """Each activation_memory, and a checkpointed layer, on the same tokens."""
    dtype, size = DTYPES[shape.dtype], (shape.tokens, shape.model_dim)
    x = torch.randn(size, device=device, dtype=dtype).requires_grad_()
    dy, kept, cases = torch.randn_like(x), {}, []
    for name in ("fast", "lean", "lean bf16", "lean fp8", "minimal", "checkpoint"):
        mode, storage = [*("fast" if name == "checkpoint" else name).split(), "same"][:2]
        given = {"activation_memory": mode, "activation_storage": storage, **options}
        layer = make_layer(shape, device, seed, expert_network=network, **given).to(dtype)
        run = partial(checkpoint, layer, use_reentrant=False) if name == "checkpoint" else layer
        leaves = [x, *layer.parameters()]
        cases.append(
            Case(name, lambda _, run=run: ((run(x),), (dy,)), lambda leaves=leaves: leaves)
        )
        kept[name] = kept_bytes(cases[-1], leaves)

    def derive(found):
        fast = found["ms"]["fast"]["both"]["p50"]
        return {
            name: {
                "kept bytes per token": kept[name] / shape.tokens,
                "kept over fast": kept[name] / kept["fast"],
                "time over fast": phases["both"]["p50"] / fast,
            }
            for name, phases in found["ms"].items()
        }

    return Point(network, cases, {"shape": str(shape)}, {}, derive)


def goals_of(results: dict) -> list[dict]:
    """Goals of each network."""
    goals = []
    for network, most in NETWORKS.items():
        if network not in results:
            continue
        kept = results[network]["derived"]
        for mode, bound, time in (("lean", most, 1.05), ("minimal", 0.1, 1.4)):
            share = kept[mode]["kept over fast"]
            goals.append(goal(f"{network}, {mode}: kept over fast", share, bound, True))
            spent = 1 / results[network]["this_over"][mode][1]
            goals.append(goal(f"{network}, {mode}: time over fast", spent, time, True))
    return goals


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """Measure both networks."""
    names = options.networks or list(NETWORKS)
    expect_known("--networks", names, list(NETWORKS))
    name, shape = choose_shape(options, options.preset, ranks)
    path = options.output, f"memory-{name}-{ranks.device.type}"
    how = {"exchange": ExchangeConfig(overlap_degree=options.overlap)}
    settings = {**dataclasses.asdict(shape), "overlap": options.overlap}
    with Report("memory", ranks, *path, settings=settings) as report:
        points = (memory_point(shape, each, ranks.device, options.seed, **how) for each in names)
        repetitions = 2 if options.tiny else options.repetitions
        sweep(report, points, ranks, repetitions, warmup=1, goals=goals_of)
    return 0


main = program(__doc__, OPTIONS, run, PRESETS)


if __name__ == "__main__":
    sys.exit(main())
