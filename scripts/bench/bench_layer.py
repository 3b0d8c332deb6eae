"""Time of one MoE layer against the dense formulation and against its experts' products alone.

    python scripts/bench/bench_layer.py --preset cpu
    python scripts/bench/bench_layer.py --device cuda --preset meta-1.1t
    python scripts/bench/bench_layer.py --tokens 8192 --model-dim 512 --hidden-dim 2048 --experts 16

On several ranks, with a real all-to-all: python -m fairseq_tutel.launch -- python
scripts/bench/bench_layer.py ... One process runs all cases in turn and prints p20, p50 and p80 of
every phase, peak memory and the ratios; it writes them as JSON and draws a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from layer_cases import (
    ABOUT,
    CASES,
    FLOORS,
    LayerInputs,
    check_agreement,
    make_case,
    why_not_run,
)
from measure import (
    MEMORY_METHOD,
    PHASES,
    Case,
    fits,
    free_memory,
    peak_memory,
    percentiles,
    time_cases,
)
from presets import DTYPES, LAYER_BACKENDS, PRESETS, Goal, LayerShape
from ranks import Ranks, choose_device, connected
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

from fairseq_tutel.distributed import build_groups

_SIZES = ("tokens", "model_dim", "hidden_dim", "experts", "top_k", "capacity_factor", "dtype")
_MIB = 2**20


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    about = "\n".join(f"  {name:14s} {preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=f"presets:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add(
        "--preset",
        dest="presets",
        type=_preset_names,
        default=[None],
        metavar="NAME[,NAME...]",
        help="one after the other (default: meta-1.1t on a GPU, cpu on a CPU)",
    )
    add("--tiny", action="store_true", help="rehearsal: sizes and repetitions cut down")
    sizes = parser.add_argument_group("sizes, in place of the preset's")
    sizes.add_argument("--tokens", type=int, help="T, tokens of one rank")
    sizes.add_argument("--model-dim", type=int, help="M")
    sizes.add_argument("--hidden-dim", type=int, help="F, hidden dimension of an expert")
    sizes.add_argument("--experts", type=int, help="E over all ranks")
    sizes.add_argument("--top-k", type=int, help="experts per token")
    sizes.add_argument("--capacity-factor", type=float, help="> 0")
    sizes.add_argument("--dtype", choices=list(DTYPES))
    sizes.add_argument(
        "--simulate-ranks",
        type=int,
        metavar="W",
        dest="simulated_ranks",
        help="play one rank of W: each all-to-all becomes a copy (0: all experts are here)",
    )
    add(
        "--backends",
        type=lambda text: text.split(","),
        metavar="LIST",
        help=f"of {', '.join(CASES)} (default: all but dense-loop that the device can run)",
    )
    add("--repetitions", type=int, default=0, help="default: 20 on a CPU, 50 on a GPU")
    add("--warmup", type=int, default=3, help="repetitions before those that count (default: 3)")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--seed", type=int, default=1, help="of weights and inputs (default: 1)")
    add(
        "--output",
        help="JSON file; {preset} in it stands for the preset's name (default: "
        "runs/bench/layer-{preset}-DEVICE.json)",
    )
    add("--figure", type=Path, help="PNG file (default: beside the JSON file)")
    options = parser.parse_args(argv)
    if options.tiny:
        options.repetitions, options.warmup = 2, 1
    return options


def _preset_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PRESETS:
            raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(PRESETS)}")
    return names


def choose_shape(options, preset: str | None, device: torch.device, world_size: int):
    """(preset name, shape) of a command line and one of its presets.

    Raises:
        ValueError: sizes that make no layer.
    """
    name = preset or ("meta-1.1t" if device.type == "cuda" else "cpu")
    shape = PRESETS[name].shape.on_ranks(world_size)
    if options.tiny:
        name, shape = f"tiny-{name}", shape.tiny()
    given = {key: getattr(options, key) for key in (*_SIZES, "simulated_ranks")}
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        shape, name = dataclasses.replace(shape, **given), "custom"
    for key in ("tokens", "model_dim", "hidden_dim", "experts", "top_k", "capacity_factor"):
        if getattr(shape, key) <= 0:
            raise ValueError(f"--{key.replace('_', '-')} {getattr(shape, key)} must be positive")
    if shape.simulated_ranks > 1 and world_size > 1:
        raise ValueError(
            f"--simulate-ranks {shape.simulated_ranks} runs on one rank, not on {world_size}"
        )
    return name, shape


def choose_cases(options, shape: LayerShape, ranks: Ranks) -> tuple[list[str], dict]:
    """Names of the cases to run, and name -> reason of those that cannot run on some rank.

    Raises:
        ValueError: an unknown name.
    """
    names = options.backends or [name for name in CASES if name != "dense-loop"]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"--backends {','.join(unknown)}: choose from {', '.join(CASES)}")
    reasons = {name: why_not_run(name, shape, ranks.device) for name in names}
    # on every rank or none: free memory differs, and all take part in an exchange
    anywhere = ranks.slowest([float(reason is not None) for reason in reasons.values()])
    skipped = {
        name: reason or "another rank cannot run it"
        for (name, reason), skip in zip(reasons.items(), anywhere, strict=True)
        if skip
    }
    if not options.backends and ranks.device.type != "cuda":
        skipped.pop("triton")
        names.remove("triton")
    return [name for name in CASES if name in names and name not in skipped], skipped


def leave_out_large(cases: Sequence[Case], ranks: Ranks, skipped: dict[str, str]) -> list[Case]:
    """The cases that find the memory they need; the others are added to ``skipped``."""
    if ranks.device.type != "cuda" or ranks.world_size > 1:  # where all take part or none
        return list(cases)
    found = [case for case in cases if fits(case, ranks.device)]
    skipped.update(
        (case.name, "it ran out of memory on this GPU") for case in cases if case not in found
    )
    return found


def measure(
    names: Sequence[str],
    inputs: LayerInputs,
    options,
    ranks: Ranks,
    skipped: dict[str, str],
    progress: Callable[[Callable[[], dict]], None],
) -> dict[str, Any]:
    """name -> statistics of every phase in ms, peak memory, raw times.

    Args:
        skipped: gets the reasons of cases that are found not to run.
        progress: gets a function that returns the same of the repetitions so far.
    """
    backends = [name for name in names if name in LAYER_BACKENDS]
    operators = backends[0] if backends else "torch"
    cases = [make_case(name, inputs, operators) for name in names]
    cases = leave_out_large(cases, ranks, skipped)
    # the layer itself is what the others are compared with
    by_layer_first = sorted(cases, key=lambda case: case.name not in LAYER_BACKENDS)
    agreement = check_agreement(by_layer_first, inputs)
    memory = {case.name: peak_memory(case, ranks.device) for case in cases}

    def summarise(times):
        results = {}
        for case in cases:
            raw = {phase: ranks.slowest(values) for phase, values in times[case.name].items()}
            results[case.name] = {
                "about": ABOUT[case.name],
                "ms": {phase: percentiles(values) for phase, values in raw.items()},
                "peak_bytes": memory[case.name],
                "rms_error_ratio": agreement.get(case.name),
                "raw_ms": raw,
            }
        return results

    def so_far(times):
        if ranks.world_size == 1:  # else a summary is a collective call
            progress(lambda: summarise(times))

    return summarise(
        time_cases(
            cases,
            ranks.device,
            options.repetitions or (50 if ranks.device.type == "cuda" else 20),
            warmup=options.warmup,
            barrier=ranks.barrier,
            progress=so_far,
        )
    )


def ratios(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of medians: how many times faster than ``dense``, how many times the ``products``."""

    def median(name, phase):
        return results[name]["ms"][phase]["p50"]

    found: dict[str, dict[str, float]] = {}
    for name in results:
        for reference in ("dense", *FLOORS):
            if reference not in results or name == reference:
                continue
            for phase in PHASES:
                if reference == "dense":
                    key, ratio = "dense/this", median("dense", phase) / median(name, phase)
                else:
                    key, ratio = f"this/{reference}", median(name, phase) / median(reference, phase)
                found.setdefault(name, {})[f"{key} {phase}"] = ratio
    return found


def check_goals(goals: Sequence[Goal], results: dict[str, Any], device_type: str) -> list[dict]:
    """What was reached of the goals that hold for the device."""
    layer = next((name for name in LAYER_BACKENDS if name in results), None)
    found = []
    for goal in goals:
        top, bottom = (layer if n == "layer" else n for n in (goal.numerator, goal.denominator))
        if goal.device != device_type or top not in results or bottom not in results:
            continue
        value = results[top]["ms"][goal.phase]["p50"] / results[bottom]["ms"][goal.phase]["p50"]
        reached = value <= goal.bound if goal.at_most else value >= goal.bound
        found.append({"goal": goal.text, "ratio": value, "bound": goal.bound, "reached": reached})
    return found


def print_result(result: dict[str, Any]) -> None:
    """Table, ratios and goals."""
    shape = result["settings"]
    say(
        f"MoE layer on {device_name(result)}, {result['world_size']} rank(s): "
        f"{shape['tokens']} tokens, {shape['model_dim']}/{shape['hidden_dim']}, "
        f"{shape['experts']} experts ({shape['local_experts']} here), top-{shape['top_k']}, "
        f"capacity {shape['capacity']}, {shape['dtype']}"
    )
    if shape["simulated_ranks"]:
        say(f"SIMULATED rank of {shape['simulated_ranks']}: each all-to-all is a local copy")
    rows = []
    for name, case in result["results"].items():
        row = [name]
        for phase in PHASES:
            ms = case["ms"][phase]
            row.append(f"{ms['p50']:.2f} ({ms['p20']:.2f}-{ms['p80']:.2f})")
        peak = case["peak_bytes"]
        row.append("-" if peak is None else f"{peak / _MIB:.0f}")
        of = result["ratios"].get(name, {})
        for key in ("dense/this both", "this/products both"):
            row.append(f"{of[key]:.2f}" if key in of else "-")
        rows.append(row)
    header = [
        "case",
        "forward ms",
        "backward ms",
        "both ms: p50 (p20-p80)",
        "peak MiB",
        "times faster than dense",
        "times products",
    ]
    say(table(header, rows))
    for name, reason in result["not_run"].items():
        say(f"{name}: not run: {reason}")
    for goal in result["goals"]:
        verdict = "reached" if goal["reached"] else "NOT reached"
        say(f"goal: {goal['goal']}: {goal['ratio']:.2f}, {verdict}")


def run(options: argparse.Namespace, preset: str | None, ranks: Ranks) -> dict[str, Any]:
    """Measure, print and write."""
    name, shape = choose_shape(options, preset, ranks.device, ranks.world_size)
    names, skipped = choose_cases(options, shape, ranks)
    groups = build_groups(shape.experts, simulate_world_size=shape.simulated_ranks)
    inputs = LayerInputs(shape, groups, ranks.device, options.seed)
    others = OtherLoad()
    about = {
        **describe_run("layer", ranks.device, ranks.world_size),
        "preset": name,
        "about": PRESETS[name].about if name in PRESETS else "sizes of the command line",
        "settings": {
            **dataclasses.asdict(shape),
            "capacity": shape.capacity,
            "local_experts": groups.num_local_experts,
            "rows": shape.rows(ranks.world_size),
            "repetitions": options.repetitions,
        },
        "memory_method": MEMORY_METHOD[ranks.device.type],
    }
    goals = PRESETS[name].goals if name in PRESETS else ()

    def whole(results):
        return {
            **about,
            "cpu_share_of_others": others.share(),
            "results": results,
            "not_run": skipped,
            "ratios": ratios(results),
            "goals": check_goals(goals, results, ranks.device.type),
        }

    output = str(options.output or f"runs/bench/layer-{{preset}}-{ranks.device.type}.json")
    path = Path(output.replace("{preset}", name))
    journal = Journal(path if ranks.first else None)
    results = measure(
        names,
        inputs,
        options,
        ranks,
        skipped,
        lambda so_far: journal.keep(lambda: whole(so_far())),
    )
    result = whole(results)
    if ranks.first:
        print_result(result)
        write_json(result, path)
        say(f"written: {path}")
        draw(result, options.figure or path.with_suffix(".png"))
    return result


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure, where matplotlib is installed."""
    import figures

    if figures.draw(result, path):
        say(f"drawn: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line, 1 where one of several presets failed."""
    options = parse_arguments(argv)
    quiet_logs()
    if options.threads:
        torch.set_num_threads(options.threads)
    several, failed = len(options.presets) > 1, False
    try:
        if several and options.output and "{preset}" not in options.output:
            raise ValueError(f"--output {options.output}: several presets need {{preset}} in it")
        with connected(choose_device(options.device)) as ranks:
            for preset in options.presets:
                try:
                    run(options, preset, ranks)
                except Exception:
                    if not several or ranks.world_size > 1:
                        raise
                    traceback.print_exc()  # what one shape cannot, the next one may
                    failed = True
                free_memory(ranks.device)
    except ValueError as error:
        sys.stderr.write(f"bench_layer.py: error: {error}\n")
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
