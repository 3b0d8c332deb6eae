"""Memory and time of one MoE layer, by ``activation_memory``, beside a checkpointed layer.

    python scripts/bench/bench_memory.py --preset cpu
    python scripts/bench/bench_memory.py --device cuda --preset meta-1.1t
    sudo python scripts/bench/two_nodes.py --ranks 2 --rate 1gbit -- \
        python scripts/bench/bench_memory.py --tokens 2048 --experts 8 --overlap 4

Kept are the bytes of storages that autograd keeps, each once, without parameters and input. Good:
lean keeps half (gated: 0.6) and takes at most 1.05 times the time; minimal keeps a tenth and takes
at most 1.4 times.
"""

import dataclasses
import sys
from functools import partial

import torch
from harness import Case, Goal, Point, sweep
from layers import PRESET, SIZES, Inputs, choose_shape, make_layer
from program import program
from record import median_ratio
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.config import ExchangeConfig

NETWORKS = {"ffn": 0.5, "swiglu": 0.6}  # and what lean may keep
# case -> activation_memory, activation_storage
MODES = {
    "fast": ("fast", "same"),
    "lean": ("lean", "same"),
    "lean fp8": ("lean", "fp8"),
    "minimal": ("minimal", "same"),
    "checkpoint": ("fast", "same"),
}
OPTIONS = {**PRESET, "overlap": (1, "chunks in which rows travel between ranks"), **SIZES}


def kept_bytes(case: Case, leaves: set[torch.Tensor]) -> int:
    """Return the bytes of distinct storages that autograd keeps, but for those of ``leaves``."""
    sizes, alive = {}, []  # a storage that is freed may come again

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.forward(0)
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


def memory_point(shape, network, options, device) -> Point:
    """Return each activation_memory, and a checkpointed layer, on the same tokens."""
    inputs, kept, cases = Inputs(shape, device, options.seed), {}, []
    how = {"expert_network": network, "exchange": ExchangeConfig(overlap_degree=options.overlap)}
    for name, (mode, storage) in MODES.items():
        how |= {"activation_memory": mode, "activation_storage": storage}
        layer = make_layer(shape, device, options.seed, **how)
        run = partial(checkpoint, layer, use_reentrant=False) if name == "checkpoint" else layer
        cases.append(inputs.case(name, run, layer.parameters()))
        kept[name] = kept_bytes(cases[-1], inputs.leaves)

    def derive(found):
        return {
            name: {
                "kept bytes per token": kept[name] / shape.tokens,
                "kept over fast": kept[name] / kept["fast"],
                "time over fast": median_ratio(found, name, "fast"),
            }
            for name in found["ms"]
        }

    goals = [
        Goal("lean", "kept over fast", NETWORKS[network], at_most=True),
        Goal("lean", "time over fast", 1.05, at_most=True),
        Goal("minimal", "kept over fast", 0.1, at_most=True),
        Goal("minimal", "time over fast", 1.4, at_most=True),
    ]
    return Point(network, cases, {"shape": str(shape)}, {}, derive, goals)


@program(__doc__, OPTIONS)
def main(options, ranks):
    name, shape = choose_shape(options, options.preset, ranks)
    about = {"settings": {**dataclasses.asdict(shape), "overlap": options.overlap}}
    how = {"repetitions": 20, "warmup": 1, "file": f"memory-{name}-{ranks.device.type}"}
    points = (memory_point(shape, network, options, ranks.device) for network in NETWORKS)
    sweep("memory", options, ranks, points, about=about, **how)


if __name__ == "__main__":
    sys.exit(main())
