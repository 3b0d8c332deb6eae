"""Speed of the layer's single operators as a share of the device's copy bandwidth.

    python scripts/bench/bench_kernels.py --preset cpu
    python scripts/bench/bench_kernels.py --device cuda --preset meta-1.1t

An operator's bandwidth is the fewest bytes of its task (every input and output once) over
its time. A copy of a large buffer, timed in turn, gives the device's bandwidth. ``assign_slots`` is
also compared with ``torch.cumsum`` of masks. A known GPU also has predicted times.

Good on a GPU: dispatch and combine at 80 % of the copy, assign_slots 24 times torch.cumsum.
"""

import dataclasses
import sys
from collections.abc import Callable

import torch
from harness import Case, Goal, Point, call, sweep
from layers import BACKENDS, DTYPES, PRESET, SIZES, LayerShape, choose_shape, why_not_run
from predict import CUMSUM, beside, fewest_bytes, rates_of
from program import program, words
from torch import Tensor

from fairseq_tutel import ops
from fairseq_tutel.ops.backend import implementation

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}  # far more than any cache
_SHARE, _FASTER = "share of copy", "times faster than torch"
GOALS = [
    Goal("dispatch (triton)", _SHARE, 0.80),
    Goal("combine (triton)", _SHARE, 0.80),
    Goal("assign_slots (triton)", _FASTER, 24.0),
]
OPTIONS = {
    **PRESET,
    **SIZES,
    "backends": (words, "default: those that the device can run", BACKENDS),
}


def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """Run the kernel between the experts' products, or torch's operators in its place."""
    if ops.backend_for(h.device) == "triton":
        return implementation("bias_act_fwd", h)(h, bias, activation="gelu")
    return torch.nn.functional.gelu(h + bias[:, None])


def bias_gelu_bwd(d: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Run its gradient."""
    if ops.backend_for(h.device) == "triton":
        return implementation("bias_act_bwd", d)(d, h, bias, activation="gelu")
    d_h = torch.ops.aten.gelu_backward(d, h + bias[:, None])
    return d_h, d_h.sum(1)


def make_kernels(shape: LayerShape, device, seed: int, sets: int) -> tuple[dict, float]:
    """Return all operators at the sizes of one layer, and the share of rows that hold a token.

    Args:
        sets: input sets; more of them than fit into the cache.

    Returns:
        name -> (function, arguments of each set); share.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    T, E, K, M = shape.tokens, shape.experts, shape.top_k, shape.model_dim
    local, C = shape.local_experts, shape.capacity
    N = shape.rows // local
    own = torch.ops.fairseq_tutel

    def draw(*size, dtype=DTYPES[shape.dtype]):
        options = {"device": device, "dtype": dtype, "generator": generator}
        return [torch.randn(size, **options) for _ in range(sets)]

    def rows_of(expert, gate, *slots):  # the last result is the slots
        layout = {"capacity": C, "padded": True, "normalize": K > 1}
        return ops.assign_rows(expert, gate, E, slots=slots, **layout)[:4]

    def gating_gradients(logits):
        expert, gate, prob_sum, _, lse = ops.topk_gating(logits, K)
        return (*map(torch.randn_like, (gate, prob_sum, lse)), logits, lse, expert)

    logits = draw(T, E, dtype=torch.float32)
    chosen = [ops.topk_gating(x, K)[:2] for x in logits]
    experts = [expert for expert, _ in chosen]
    slots = [ops.assign_slots(expert, E) for expert in experts]
    maps = [rows_of(*pair, *slot) for pair, slot in zip(chosen, slots, strict=True)]
    row, pair, weight = ([each[i] for each in maps] for i in range(3))
    tokens, grads, rows = draw(T, M), draw(T, M), draw(E * C, M)
    hidden, d_hidden = draw(local, N, shape.hidden_dim), draw(local, N, shape.hidden_dim)
    bias = draw(local, shape.hidden_dim)
    # fairseq's way of the slots, on the 0/1 masks of all choices
    masks = [torch.nn.functional.one_hot(expert.t().flatten().long(), E) for expert in experts]

    def gradients(*arguments):
        return own.combine_bwd(*arguments, None, None, True, True, False)

    kernels = {
        "topk_gating": (lambda x: own.topk_gating(x, K, None, None), (logits,)),
        "topk_gating bwd": (own.topk_gating_bwd, zip(*map(gating_gradients, logits), strict=True)),
        "assign_slots": (lambda x: ops.assign_slots(x, E), (experts,)),
        "assign_rows": (rows_of, (*zip(*chosen, strict=True), *zip(*slots, strict=True))),
        "dispatch": (ops.dispatch, (tokens, row, pair)),
        "dispatch bwd": (own.dispatch_bwd, (rows, row)),
        "combine": (ops.combine, (rows, row, pair, weight)),
        "combine bwd": (gradients, (grads, rows, row, pair, weight)),
        "bias_act gelu": (bias_gelu, (hidden, bias)),
        "bias_act gelu bwd": (bias_gelu_bwd, (d_hidden, hidden, bias)),
        CUMSUM: (lambda x: torch.cumsum(x, dim=0) - 1, (masks,)),
    }
    full = (pair[0] >= 0).double().mean().item()
    by_set = {name: (run, list(zip(*of, strict=True))) for name, (run, of) in kernels.items()}
    return by_set, full


def timed(name: str, backend: str, run: Callable, inputs: list[tuple]) -> Case:
    """Return an operator as a case."""
    forward = call(lambda number: run(*inputs[number % len(inputs)]))
    return Case(f"{name} ({backend})", forward, select=lambda: ops.set_backend(backend))


@program(__doc__, OPTIONS)
def main(options, ranks):
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    name, shape = choose_shape(options, options.preset, ranks)
    backends = options.backends or (BACKENDS if on_gpu else ["torch"])
    for backend in backends:
        if reason := why_not_run(backend, shape, device):
            raise ValueError(f"--backends {backend}: {reason}")
    ops.set_backend("torch")
    kernels, full = make_kernels(shape, device, options.seed, sets=3)
    fewest, rates = fewest_bytes(shape, full), rates_of(device)
    source = torch.empty(_COPY_BYTES[device.type] // 4, device=device).normal_()
    target = torch.empty_like(source)
    size_of, cases = {}, [Case("copy", call(lambda _: target.copy_(source)))]
    for kernel, (run, inputs) in kernels.items():
        for backend in ["torch"] if kernel == CUMSUM else backends:
            cases.append(timed(kernel, backend, run, inputs))
            size_of[cases[-1].name] = fewest[kernel]

    def derive(found):
        ms = {case: of["forward"]["p50"] for case, of in found["ms"].items()}
        per_byte = ms.pop("copy") / (2 * source.nbytes)
        torchs = ms.get(f"{CUMSUM} (torch)")
        derived = {}
        for case, taken in ms.items():
            size = size_of[case]
            derived[case] = {"bytes": size, _SHARE: size * per_byte / taken}
            derived[case] |= beside(taken, rates and rates.bytes_ms(size))
            if case.startswith("assign_slots") and torchs:
                derived[case][_FASTER] = torchs / taken
        return derived

    about = {"shape": str(shape), "settings": dataclasses.asdict(shape)}
    point = Point(name, cases, about, {}, derive, GOALS, phase="")
    how = {"repetitions": 100 if on_gpu else 20, "file": f"kernels-{name}-{device.type}"}
    sweep("kernels", options, ranks, [point], about={"preset": name}, **how)


if __name__ == "__main__":
    sys.exit(main())
