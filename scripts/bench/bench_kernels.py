"""Speed of the layer's single operators as a share of the device's copy bandwidth.

    python scripts/bench/bench_kernels.py --preset cpu
    python scripts/bench/bench_kernels.py --device cuda --preset meta-1.1t

An operator's bandwidth is the bytes that it must at least move (every input and output once) over
its time; a plain copy of one large buffer, timed in turn with the operators, gives the bandwidth
that it is compared with. ``assign_slots`` is also compared with ``torch.cumsum`` of masks.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import runner
import torch
from layer_cases import why_not_run
from measure import Case, percentiles, time_cases
from presets import DTYPES, LAYER_BACKENDS, PRESETS, LayerShape, add_size_options, choose_shape
from ranks import Ranks
from record import device_name, goal, say, table
from runner import Report, command_line, expect_known, words
from torch import Tensor

from fairseq_tutel import ops
from fairseq_tutel.ops.backend import implementation

# Operators that torch has too, in the way they are otherwise written.
TORCH_TWINS = {"assign_slots": "torch.cumsum - 1"}
# Bytes of the buffer that is copied: far more than any cache.
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
_CUMSUM_GOAL = 24.0
_SHARE_GOAL = 0.80


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PRESETS)
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="default: meta-1.1t on a GPU, cpu on a CPU")
    add_size_options(parser)
    add("--backends", help="of triton, torch (default: those that the device can run)", **words())
    add("--only", metavar="TEXT", help="operators whose name contains this")
    add("--repetitions", type=int, default=0, help="default: 20 on a CPU, 100 on a GPU")
    add("--warmup", type=int, default=5)
    add("--input-sets", type=int, default=3, help="take turns (default: 3)")
    add("--output", type=Path, help="JSON file (default: runs/bench/kernels-PRESET-DEVICE.json)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.repetitions, options.warmup = 2, 1
    return options


@dataclass(frozen=True)
class KernelCase:
    """One operator on input sets that take turns.

    Attributes:
        name: of the operator, with ``bwd`` for its gradient.
        call: input set -> outputs.
        inputs: one tuple of arguments per set.
        own: False for torch's own way of doing the same.
        unread: inputs of the first set -> bytes of them that need not be read.
    """

    name: str
    call: Callable[..., object]
    inputs: Sequence[tuple] = field(repr=False)
    own: bool = True
    unread: Callable[..., int] = lambda *inputs: 0

    def bytes_moved(self) -> int:
        """Of inputs and outputs, each once."""
        inputs = self.inputs[0]
        return sum(map(_bytes, inputs)) - self.unread(*inputs) + _bytes(self.call(*inputs))


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _unused(rows: Tensor, pair: Tensor) -> int:
    """Bytes of the rows that no token is in."""
    return int((pair < 0).sum()) * rows.shape[-1] * rows.element_size()


class _Routed(NamedTuple):
    """Routing of one input set: the maps of the padded layout."""

    expert: Tensor
    position: Tensor
    gate: Tensor
    num_routed: Tensor
    row: Tensor
    pair: Tensor
    weight: Tensor


def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """The kernel between the experts' products, or torch's operators in its place."""
    if ops.backend_for(h.device) == "triton":
        return implementation("bias_act_fwd", h)(h, bias, activation="gelu")
    return torch.nn.functional.gelu(h + bias[:, None])


def bias_gelu_bwd(d: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    if ops.backend_for(h.device) == "triton":
        return implementation("bias_act_bwd", d)(d, h, bias, activation="gelu")
    d_h = torch.ops.aten.gelu_backward(d, h + bias[:, None])
    return d_h, d_h.sum(1)


def make_kernel_cases(
    shape: LayerShape, device: torch.device, seed: int, sets: int
) -> list[KernelCase]:
    """All operators at the sizes of one layer; the rows that this rank sends.

    Args:
        sets: input sets; more of them than fit into the cache.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    T, E, K, M = shape.tokens, shape.experts, shape.top_k, shape.model_dim
    local, C = shape.local_experts(1), shape.capacity
    N = shape.rows(1) // local
    layout = {"capacity": C, "padded": True, "normalize": K > 1}

    def draw(*size, dtype=DTYPES[shape.dtype]):
        options = {"device": device, "dtype": dtype, "generator": generator}
        return [torch.randn(size, **options) for _ in range(sets)]

    def route(logits):
        expert, gate, *_ = ops.topk_gating(logits, K)
        slots = position, num_routed = ops.assign_slots(expert, E)
        row, pair, weight, _ = rows_of(expert, gate, *slots)
        return _Routed(expert, position, gate, num_routed, row, pair, weight)

    def rows_of(expert, gate, *slots):  # the last result is of the slots
        return ops.assign_rows(expert, gate, E, slots=slots, **layout)[:4]

    def gating_gradients(logits):
        expert, gate, prob_sum, _, lse = ops.topk_gating(logits, K)
        return (*map(torch.randn_like, (gate, prob_sum, lse)), logits, lse, expert)

    logits = draw(T, E, dtype=torch.float32)
    routed = [route(x) for x in logits]
    tokens, grads, rows = draw(T, M), draw(T, M), draw(E * C, M)
    hidden, d_hidden = draw(local, N, shape.hidden_dim), draw(local, N, shape.hidden_dim)
    (bias, *_) = draw(local, shape.hidden_dim)
    own = torch.ops.fairseq_tutel

    def on_rows(*before):
        return [(*x, r.row, r.pair) for *x, r in zip(*before, routed, strict=True)]

    cases = [
        ("topk_gating", lambda x: own.topk_gating(x, K, None, None), [(x,) for x in logits]),
        ("topk_gating bwd", own.topk_gating_bwd, [gating_gradients(x) for x in logits]),
        ("assign_slots", lambda x: ops.assign_slots(x, E), [(r.expert,) for r in routed]),
        ("assign_rows", rows_of, [(r.expert, r.gate, r.position, r.num_routed) for r in routed]),
        ("dispatch", ops.dispatch, on_rows(tokens), lambda x, row, pair: _bytes(row)),
        (
            "dispatch bwd",
            lambda d, row, pair: own.dispatch_bwd(d, row),
            on_rows(rows),
            lambda d, row, pair: _bytes(pair) + _unused(d, pair),
        ),
        (
            "combine",
            ops.combine,
            [(*x, r.weight) for x, r in zip(on_rows(rows), routed, strict=True)],
            lambda x, row, pair, weight: _bytes(pair) + _unused(x, pair),
        ),
        (
            "combine bwd",
            lambda *arguments: own.combine_bwd(*arguments, True, True),
            [(*x, r.weight) for x, r in zip(on_rows(grads, rows), routed, strict=True)],
            lambda d, x, row, pair, weight: _bytes(row) + _unused(x, pair),
        ),
        (
            "bias_act gelu",
            bias_gelu,
            [(h, bias) for h in hidden],
        ),
        (
            "bias_act gelu bwd",
            bias_gelu_bwd,
            [(d, h, bias) for d, h in zip(d_hidden, hidden, strict=True)],
        ),
    ]
    found = []
    for name, call, inputs, *unread in cases:
        found.append(KernelCase(name, call, inputs, True, *unread))
    # fairseq's way of the slots, on the 0/1 masks of all choices
    masks = [(torch.nn.functional.one_hot(r.expert.t().flatten().long(), E),) for r in routed]
    twin = TORCH_TWINS["assign_slots"]
    found.append(KernelCase(twin, lambda x: torch.cumsum(x, dim=0) - 1, masks, own=False))
    return found


def timed(kernel: KernelCase, backend: str) -> Case:
    """An operator as a case without gradients."""

    def forward(number):
        with torch.no_grad():
            return (kernel.call(*kernel.inputs[number % len(kernel.inputs)]),), ()

    name = f"{kernel.name}|{backend}"
    chosen = backend if backend in LAYER_BACKENDS else "torch"
    return Case(name, forward, select=lambda: ops.set_backend(chosen))


def copy_case(device: torch.device) -> tuple[Case, int]:
    """A copy of a large buffer, and the bytes that it moves."""
    size = _COPY_BYTES[device.type]
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)

    def forward(_):
        return (target.copy_(source),), ()

    return Case("copy|torch", forward), 2 * size


def speed(times: dict[str, dict], name: str, size: int) -> dict[str, Any]:
    """Of a case that moves so many bytes."""
    ms = percentiles(times[name]["forward"])
    return {"ms": ms, "bytes": size, "bytes_per_second": size / (1e-3 * ms["p50"])}


def compare_with_torch(rows: Sequence[dict]) -> dict[str, float]:
    """How many times faster than torch's own way, by operator and backend."""
    median = {(row["name"], row["backend"]): row["ms"]["p50"] for row in rows}
    return {
        f"{name} ({backend})": median[TORCH_TWINS[name], "aten"] / ms
        for (name, backend), ms in median.items()
        if name in TORCH_TWINS and (TORCH_TWINS[name], "aten") in median
    }


def check_goals(rows: Sequence[dict], faster: dict[str, float], device_type: str) -> list[dict]:
    """What was reached on a GPU by the Triton kernels."""
    if device_type != "cuda":
        return []
    shares = {row["name"]: row["share_of_copy"] for row in rows if row["backend"] == "triton"}
    goals = [
        goal(f"{name} at {_SHARE_GOAL:.0%} of copy bandwidth", shares[name], _SHARE_GOAL)
        for name in ("dispatch", "combine")
        if name in shares
    ]
    times = faster.get("assign_slots (triton)")
    if times is not None:
        text = f"assign_slots at least {_CUMSUM_GOAL:g} times torch.cumsum minus one"
        goals.append(goal(text, times, _CUMSUM_GOAL))
    return goals


def print_result(result: dict[str, Any]) -> None:
    """The table."""
    shape = result["settings"]
    say(
        f"operators on {device_name(result)}: {shape['tokens']} tokens, "
        f"{shape['model_dim']}/{shape['hidden_dim']}, {shape['experts']} experts, "
        f"top-{shape['top_k']}, {shape['dtype']}; "
        f"copy: {result['copy']['bytes_per_second'] / 1e9:.1f} GB/s"
    )
    shown = {
        "operator": "{name}",
        "backend": "{backend}",
        **{f"{p} ms": f"{{ms[{p}]:.4g}}" for p in ("p20", "p50", "p80")},
        "bytes": "{bytes:,}",
        "of copy": "{share_of_copy:.0%}",
    }
    say(table(result["results"], shown))
    for name, factor in result["times_faster_than_torch"].items():
        say(f"{name}: {factor:.2f} times faster than torch.cumsum minus one")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write.

    Raises:
        ValueError: an unknown operator or backend, or one that the device cannot run.
    """
    device = ranks.device
    name, shape = choose_shape(options, options.preset, ranks)
    backends = options.backends or (LAYER_BACKENDS if device.type == "cuda" else ["torch"])
    expect_known("--backends", backends, LAYER_BACKENDS)
    for backend in backends:
        if reason := why_not_run(backend, shape, device):
            raise ValueError(f"--backends {backend}: {reason}")
    ops.set_backend("torch")
    kernels = make_kernel_cases(shape, device, options.seed, options.input_sets)
    kernels = [k for k in kernels if options.only is None or options.only in k.name]
    if not kernels:
        raise ValueError(f"--only {options.only}: no operator has that in its name")
    path = options.output or Path(f"runs/bench/kernels-{name}-{device.type}.json")
    settings = {**dataclasses.asdict(shape), "capacity": shape.capacity}
    report = Report("kernels", ranks, path, preset=name, settings=settings)

    copy, copy_bytes = copy_case(device)
    runs = [(kernel, b) for kernel in kernels for b in (backends if kernel.own else ["aten"])]
    moved = {}
    for kernel, backend in runs:
        ops.set_backend(backend if backend in LAYER_BACKENDS else "torch")
        moved[kernel.name, backend] = kernel.bytes_moved()

    def whole(times):
        copied = speed(times, copy.name, copy_bytes)
        rows = []
        for (kernel, backend), size in moved.items():
            own = speed(times, f"{kernel}|{backend}", size)
            share = own["bytes_per_second"] / copied["bytes_per_second"]
            rows.append({"name": kernel, "backend": backend, **own, "share_of_copy": share})
        faster = compare_with_torch(rows)
        goals = check_goals(rows, faster, device.type)
        return {"copy": copied, "results": rows, "times_faster_than_torch": faster, "goals": goals}

    cases = [copy, *(timed(kernel, backend) for kernel, backend in runs)]
    progress = lambda times: report.keep(lambda: whole(times))  # noqa: E731
    repetitions = options.repetitions or (100 if device.type == "cuda" else 20)
    times = time_cases(cases, device, repetitions, warmup=options.warmup, progress=progress)
    report.finish(whole(times), print_result)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
