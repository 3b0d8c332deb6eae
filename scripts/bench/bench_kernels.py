"""Speed of the layer's single operators as a share of the device's copy bandwidth.

    python scripts/bench/bench_kernels.py --preset cpu
    python scripts/bench/bench_kernels.py --device cuda --preset meta-1.1t

An operator's bandwidth is the bytes that it must at least move (every input and output once) over
its time; a plain copy of one large buffer, timed in turn with the operators, gives the bandwidth
that it is compared with. ``fast_cumsum_sub_one`` is also compared with ``torch.cumsum`` minus one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from kernel_cases import TORCH_TWINS, KernelCase, make_kernel_cases
from layer_cases import why_not_run
from measure import Case, percentiles, time_cases
from presets import LAYER_BACKENDS, PRESETS, LayerShape
from ranks import choose_device
from record import (
    Journal,
    OtherLoad,
    describe_run,
    device_name,
    quiet_logs,
    say,
    table,
    write_json,
)

from fairseq_tutel import ops

# Bytes of the buffer that is copied: far more than any cache.
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
_CUMSUM_GOAL = 24.0
_SHARE_GOAL = 0.80


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--preset", choices=list(PRESETS), help="default: meta-1.1t on a GPU, cpu on a CPU")
    add("--tiny", action="store_true", help="rehearsal: sizes and repetitions cut down")
    for name in ("tokens", "model-dim", "hidden-dim", "experts", "top-k"):
        add(f"--{name}", type=int, help="in place of the preset's")
    add("--dtype", choices=["float32", "float16", "bfloat16"], help="in place of the preset's")
    add(
        "--backends",
        type=lambda text: text.split(","),
        metavar="LIST",
        help="of triton, torch (default: those that the device can run)",
    )
    add("--only", metavar="TEXT", help="operators whose name contains this")
    add("--repetitions", type=int, default=0, help="default: 20 on a CPU, 100 on a GPU")
    add("--warmup", type=int, default=5)
    add("--input-sets", type=int, default=3, help="take turns (default: 3)")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--seed", type=int, default=1)
    add("--output", type=Path, help="JSON file (default: runs/bench/kernels-PRESET-DEVICE.json)")
    add("--figure", type=Path, help="PNG file (default: beside the JSON file)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.repetitions, options.warmup = 2, 1
    return options


def choose_shape(options, device: torch.device) -> tuple[str, LayerShape]:
    """(preset name, shape) of a command line."""
    name = options.preset or ("meta-1.1t" if device.type == "cuda" else "cpu")
    keys = ("tokens", "model_dim", "hidden_dim", "experts", "top_k", "dtype")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    shape = PRESETS[name].shape
    if options.tiny:
        name, shape = f"tiny-{name}", shape.tiny()
    shape = dataclasses.replace(shape, **given)
    if "experts" in given:
        shape = dataclasses.replace(shape, simulated_ranks=0)
    return ("custom" if given else name), shape


def choose_backends(options, shape: LayerShape, device: torch.device) -> list[str]:
    """Backends to run.

    Raises:
        ValueError: an unknown one, or one that the device cannot run.
    """
    if not options.backends:
        return [b for b in LAYER_BACKENDS if why_not_run(b, shape, device) is None]
    for name in options.backends:
        if name not in LAYER_BACKENDS:
            raise ValueError(f"--backends {name}: choose from {', '.join(LAYER_BACKENDS)}")
        reason = why_not_run(name, shape, device)
        if reason:
            raise ValueError(f"--backends {name}: {reason}")
    return options.backends


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


def measure(
    kernels: Sequence[KernelCase],
    backends,
    options,
    device,
    progress: Callable[[Callable[[], dict]], None],
) -> dict[str, Any]:
    """Rows of the result, and the copy's.

    Args:
        progress: gets a function that returns the same of the repetitions so far.
    """
    copy, copy_bytes = copy_case(device)
    runs = [(k, b) for k in kernels for b in (backends if k.own else ["aten"])]
    cases = [copy, *(timed(k, b) for k, b in runs)]
    moved = {}
    for kernel, backend in runs:
        ops.set_backend(backend if backend in LAYER_BACKENDS else "torch")
        moved[kernel.name, backend] = kernel.bytes_moved()

    def summarise(times):
        copy_ms = percentiles(times[copy.name]["forward"])
        copy_speed = copy_bytes / (1e-3 * copy_ms["p50"])
        rows = []
        for (name, backend), size in moved.items():
            ms = percentiles(times[f"{name}|{backend}"]["forward"])
            speed = size / (1e-3 * ms["p50"])
            rows.append(
                {
                    "name": name,
                    "backend": backend,
                    "ms": ms,
                    "bytes": size,
                    "bytes_per_second": speed,
                    "share_of_copy": speed / copy_speed,
                }
            )
        copy_row = {"ms": copy_ms, "bytes": copy_bytes, "bytes_per_second": copy_speed}
        return {"copy": copy_row, "results": rows}

    repetitions = options.repetitions or (100 if device.type == "cuda" else 20)
    return summarise(
        time_cases(
            cases,
            device,
            repetitions,
            warmup=options.warmup,
            progress=lambda times: progress(lambda: summarise(times)),
        )
    )


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
    goals = [
        {
            "goal": f"{row['name']} at {_SHARE_GOAL:.0%} of copy bandwidth",
            "ratio": row["share_of_copy"],
            "bound": _SHARE_GOAL,
            "reached": row["share_of_copy"] >= _SHARE_GOAL,
        }
        for row in rows
        if row["backend"] == "triton" and row["name"] in ("dispatch", "combine")
    ]
    name = "fast_cumsum_sub_one int64 (triton)"
    if name in faster:
        goals.append(
            {
                "goal": f"cumsum minus one at least {_CUMSUM_GOAL:g} times torch's",
                "ratio": faster[name],
                "bound": _CUMSUM_GOAL,
                "reached": faster[name] >= _CUMSUM_GOAL,
            }
        )
    return goals


def print_result(result: dict[str, Any]) -> None:
    """Table and goals."""
    shape = result["settings"]
    say(
        f"operators on {device_name(result)}: {shape['tokens']} tokens, "
        f"{shape['model_dim']}/{shape['hidden_dim']}, {shape['experts']} experts, "
        f"top-{shape['top_k']}, {shape['dtype']}; "
        f"copy: {result['copy']['bytes_per_second'] / 1e9:.1f} GB/s"
    )
    lines = []
    for row in result["results"]:
        ms = row["ms"]
        lines.append(
            [
                row["name"],
                row["backend"],
                f"{ms['p20']:.4g}",
                f"{ms['p50']:.4g}",
                f"{ms['p80']:.4g}",
                f"{row['bytes'] / 2**20:.1f}",
                f"{row['bytes_per_second'] / 1e9:.1f}",
                f"{row['share_of_copy']:.0%}",
            ]
        )
    say(
        table(
            ["operator", "backend", "p20 ms", "p50 ms", "p80 ms", "MiB", "GB/s", "of copy"], lines
        )
    )
    for name, factor in result["times_faster_than_torch"].items():
        say(f"{name}: {factor:.2f} times faster than torch.cumsum minus one")
    for goal in result["goals"]:
        verdict = "reached" if goal["reached"] else "NOT reached"
        say(f"goal: {goal['goal']}: {goal['ratio']:.2f}, {verdict}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and write."""
    device = choose_device(options.device)
    name, shape = choose_shape(options, device)
    backends = choose_backends(options, shape, device)
    ops.set_backend("torch")
    kernels = make_kernel_cases(shape, device, options.seed, options.input_sets)
    kernels = [k for k in kernels if options.only is None or options.only in k.name]
    if not kernels:
        raise ValueError(f"--only {options.only}: no operator has that in its name")
    others = OtherLoad()
    about = {
        **describe_run("kernels", device),
        "preset": name,
        "settings": {**dataclasses.asdict(shape), "capacity": shape.capacity},
    }

    def whole(measured):
        faster = compare_with_torch(measured["results"])
        return {
            **about,
            "cpu_share_of_others": others.share(),
            **measured,
            "times_faster_than_torch": faster,
            "goals": check_goals(measured["results"], faster, device.type),
        }

    path = options.output or Path(f"runs/bench/kernels-{name}-{device.type}.json")
    journal = Journal(path)
    result = whole(
        measure(
            kernels, backends, options, device, lambda so_far: journal.keep(lambda: whole(so_far()))
        )
    )
    print_result(result)
    write_json(result, path)
    say(f"written: {path}")
    picture = options.figure or path.with_suffix(".png")
    if figures.draw(result, picture):
        say(f"drawn: {picture}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    quiet_logs()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        run(options)
    except ValueError as error:
        sys.stderr.write(f"bench_kernels.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
