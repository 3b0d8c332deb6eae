"""Time of one MoE layer against the dense formulation and against its experts' products alone.

    python scripts/bench/bench_layer.py --preset cpu
    python scripts/bench/bench_layer.py --device cuda --preset meta-1.1t
    python scripts/bench/bench_layer.py --mode eval --preset cpu-large --tutel DIR --meta DIR
    python scripts/bench/bench_layer.py --tokens 8192 --model-dim 512 --hidden-dim 2048 --experts 16

On several ranks, with a real all-to-all: python -m fairseq_tutel.launch -- python
scripts/bench/bench_layer.py ... One process runs all cases in turn and prints p20, p50 and p80 of
every phase, peak memory and the ratios, and writes them as JSON.
"""

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eval_layer
import runner
from layer_cases import ABOUT, CASES, FLOORS, LayerInputs, check_agreement, make_case, why_not_run
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
from presets import (
    LAYER_BACKENDS,  # fmt: skip
    PRESETS,
    Goal,
    LayerShape,
    Preset,
    add_size_options,
    choose_shape,
)
from ranks import Ranks
from record import device_name, goal, say, table
from runner import Report, command_line, expect_known, words

from fairseq_tutel.distributed import build_groups


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PRESETS)
    add = parser.add_argument
    one_by_one = "one after the other (default: meta-1.1t on a GPU, cpu on a CPU)"
    several = {"dest": "presets", "type": _preset_names, "metavar": "NAME[,NAME...]"}
    add("--preset", default=[None], help=one_by_one, **several)
    add("--mode", choices=["train", "eval"], default="train", help="default: train")
    add_size_options(parser)
    eval_layer.add_options(parser)
    others = "in evaluation those of eval_cases.py"
    add("--backends", help=f"of {', '.join(CASES)}; {others} (default: all)", **words())
    add("--repetitions", type=int, default=0, help="default: 20 on a CPU, 50 on a GPU")
    add("--warmup", type=int, default=3, help="repetitions before those that count (default: 3)")
    stands = "{preset} in it stands for the preset's name"
    add("--output", help=f"JSON file; {stands} (default: runs/bench/layer-{{preset}}-DEVICE.json)")
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


def keep_possible(
    names: Sequence[str], shape: LayerShape, ranks: Ranks
) -> tuple[list[str], dict[str, str]]:
    """The cases that can run on every rank, and name -> reason of the others."""
    reasons = {name: why_not_run(name, shape, ranks.device) for name in names}
    # on every rank or none: free memory differs, and all take part in an exchange
    anywhere = ranks.slowest([float(reason is not None) for reason in reasons.values()])
    skipped = {
        name: reason or "another rank cannot run it"
        for (name, reason), skip in zip(reasons.items(), anywhere, strict=True)
        if skip
    }
    return [name for name in CASES if name in names and name not in skipped], skipped


def leave_out_large(cases: Sequence[Case], ranks: Ranks, skipped: dict[str, str]) -> list[Case]:
    """The cases that find the memory they need; the others are added to ``skipped``."""
    if ranks.device.type != "cuda" or ranks.world_size > 1:  # where all take part or none
        return list(cases)
    found = [case for case in cases if fits(case, ranks.device)]
    for case in cases:
        if case not in found:
            skipped[case.name] = "it ran out of memory on this GPU"
    return found


def median_ratio(results: dict[str, Any], above: str, below: str, phase: str) -> float:
    """Of the median times of two cases."""
    return results[above]["ms"][phase]["p50"] / results[below]["ms"][phase]["p50"]


def ratios(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times faster than ``dense`` each case is, how many times the floors it takes."""
    found: dict[str, dict[str, float]] = {name: {} for name in results}
    for name, of in found.items():
        for phase in PHASES:
            if "dense" in results and name != "dense":
                of[f"dense/this {phase}"] = median_ratio(results, "dense", name, phase)
            for floor in FLOORS:
                if floor in results and name != floor:
                    of[f"this/{floor} {phase}"] = median_ratio(results, name, floor, phase)
    return found


def check_goals(goals: Sequence[Goal], results: dict[str, Any], device_type: str) -> list[dict]:
    """What was reached of the goals that hold for the device."""
    layer = next((name for name in LAYER_BACKENDS if name in results), None)
    found = []
    for each in goals:
        top, bottom = (layer if n == "layer" else n for n in (each.numerator, each.denominator))
        if each.device == device_type and top in results and bottom in results:
            ratio = median_ratio(results, top, bottom, "both")
            found.append(goal(each.text, ratio, each.bound, each.at_most))
    return found


def print_result(result: dict[str, Any]) -> None:
    """Table and ratios."""
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
        of, peak = result["ratios"].get(name, {}), case["peak_bytes"]
        factors = [of.get(key) for key in ("dense/this both", "this/experts both")]
        times, over = ("-" if factor is None else f"{factor:.2f}" for factor in factors)
        peak = "-" if peak is None else f"{peak / 2**20:.0f}"
        rows.append({"name": name, "peak": peak, "times": times, "over": over, **case["ms"]})
    shown = {
        "case": "{name}",
        "forward ms": "{forward[p50]:.2f}",
        "backward ms": "{backward[p50]:.2f}",
        "both ms: p50 (p20-p80)": "{both[p50]:.2f} ({both[p20]:.2f}-{both[p80]:.2f})",
        "peak MiB": "{peak}",
        "times faster than dense": "{times}",
        "times experts": "{over}",
    }
    say(table(rows, shown))


def run(options: argparse.Namespace, preset: str | None, ranks: Ranks) -> None:
    """Measure, print and write."""
    device = ranks.device
    name, shape = choose_shape(options, preset, ranks)
    names = options.backends or [c for c in CASES if device.type == "cuda" or c != "triton"]
    expect_known("--backends", names, CASES)
    names, skipped = keep_possible(names, shape, ranks)
    groups = build_groups(shape.experts, simulate_world_size=shape.simulated_ranks)
    inputs = LayerInputs(shape, groups, device, options.seed)
    output = str(options.output or f"runs/bench/layer-{{preset}}-{device.type}.json")
    known = PRESETS.get(name, Preset("sizes of the command line", shape))
    settings = {
        **dataclasses.asdict(shape),
        "capacity": shape.capacity,
        "local_experts": groups.num_local_experts,
        "rows": shape.rows(ranks.world_size),
        "repetitions": options.repetitions or (50 if device.type == "cuda" else 20),
    }
    about = {"preset": name, "about": known.about, "settings": settings}
    path = Path(output.replace("{preset}", name))
    report = Report("layer", ranks, path, **about, memory_method=MEMORY_METHOD[device.type])

    operators = next((name for name in names if name in LAYER_BACKENDS), "torch")
    cases = [make_case(name, inputs, operators) for name in names]
    cases = leave_out_large(cases, ranks, skipped)
    # the layer itself is what the others are compared with
    by_layer_first = sorted(cases, key=lambda case: case.name not in LAYER_BACKENDS)
    agreement = check_agreement(by_layer_first, inputs)
    memory = {case.name: peak_memory(case, device) for case in cases}

    def result_of(name, times):
        raw = {phase: ranks.slowest(values) for phase, values in times.items()}
        return {
            "about": ABOUT[name],
            "ms": {phase: percentiles(values) for phase, values in raw.items()},
            "peak_bytes": memory[name],
            "rms_error_ratio": agreement.get(name),
            "raw_ms": raw,
        }

    def whole(times):
        results = {name: result_of(name, of) for name, of in times.items()}
        goals = check_goals(known.goals, results, device.type)
        return {
            "results": results,
            "not_run": skipped,
            "ratios": ratios(results),
            "goals": goals,
        }

    def progress(times):
        if ranks.world_size == 1:  # else a result is a collective call
            report.keep(lambda: whole(times))

    how = {"warmup": options.warmup, "barrier": ranks.barrier, "progress": progress}
    times = time_cases(cases, device, settings["repetitions"], **how)
    report.finish(whole(times), print_result)


def run_presets(options: argparse.Namespace, ranks: Ranks) -> int:
    """Exit code 1 where one of several presets failed."""
    several, failed = len(options.presets) > 1, False
    if options.mode == "eval":
        eval_layer.run(options, ranks)
        return 0
    if several and options.output and "{preset}" not in options.output:
        raise ValueError(f"--output {options.output}: several presets need {{preset}} in it")
    for preset in options.presets:
        try:
            run(options, preset, ranks)
        except Exception:
            if not several or ranks.world_size > 1:
                raise
            traceback.print_exc()  # what one shape cannot, the next one may
            failed = True
        free_memory(ranks.device)
    return int(failed)


main = runner.program(parse_arguments, run_presets)


if __name__ == "__main__":
    sys.exit(main())
