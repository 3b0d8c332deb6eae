"""Results of bench_train.py: from seconds to tokens per second, ratios, goals and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from measure import percentiles
from record import ROOT, device_name, say, table
from train_models import VARIANTS, TrainPreset, flop_matched

from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_work

# Hardware profile by a part of the GPU's name.
_PROFILES = {"H200": "h200", "H100": "h100", "A100": "a100-80g"}
_MFU_GOAL = 0.50


def summarise(measured: dict[str, dict], tokens: int, flops: dict[str, float], peak: float | None):
    """Results by variant from raw seconds."""
    results = {}
    for variant, raw in measured.items():
        spread = percentiles(raw["seconds"])
        speed = {key: tokens / value for key, value in spread.items()}
        results[variant] = {
            "about": VARIANTS[variant],
            "parameters": raw["parameters"],
            "seconds": spread,
            "tokens_per_second": speed,
            "model_flops_per_token": flops[variant],
            "model_flops_utilisation": peak and flops[variant] * speed["p50"] / peak,
            "peak_bytes_of_process": raw.get("peak_bytes_of_process"),
            "losses": raw["losses"],
            "raw_seconds": raw["seconds"],
        }
    return results


def model_flops(variants: Sequence[str], config) -> dict[str, float]:
    """Operations per token, forward and backward, as the planner counts them."""
    flops = {}
    for variant in variants:
        settings = read_settings(flop_matched(config) if variant == "flop-matched" else config, "")
        flops[variant] = count_work(settings, count_parameters(settings)).model_flops
    return flops


def peak_flops(name: str | None, config, device: torch.device) -> float | None:
    """Of the device in the config's precision, from its profile; None for an unknown device.

    Args:
        name: of the profile; None: by the GPU's name.
    """
    if name is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        name = next((profile for part, profile in _PROFILES.items() if part in gpu), None)
    if name is None:
        return None
    hardware = load_hardware(ROOT / "configs" / "hardware", name)
    half = config.common.fp16 or config.common.bf16
    return hardware.half_flops if half else hardware.fp32_flops


def compare(results: dict[str, Any], preset: TrainPreset) -> tuple[dict[str, float], list[dict]]:
    """Ratios of this plugin's median tokens/s to the others', and the goals."""
    if "moe" not in results:
        return {}, []
    own = results["moe"]["tokens_per_second"]["p50"]
    ratios = {
        f"moe/{name}": own / run["tokens_per_second"]["p50"]
        for name, run in results.items()
        if name != "moe"
    }
    goals = [
        {
            "goal": f"at least {bound:g} times the tokens/s of: {VARIANTS[name]}",
            "ratio": ratios[f"moe/{name}"],
            "bound": bound,
            "reached": ratios[f"moe/{name}"] >= bound,
        }
        for name, bound in preset.goals
        if name in results
    ]
    used = results["moe"]["model_flops_utilisation"]
    if used is not None:
        goals.append(
            {
                "goal": f"model FLOPs utilisation of at least {_MFU_GOAL:.0%}",
                "ratio": used,
                "bound": _MFU_GOAL,
                "reached": used >= _MFU_GOAL,
            }
        )
    return ratios, goals


def print_result(result: dict[str, Any]) -> None:
    """Table, ratios and goals."""
    say(f"training on {device_name(result)}, {result['world_size']} rank(s): {result['title']}")
    if result["settings"]["simulated_ranks"]:
        say(f"SIMULATED rank of {result['settings']['simulated_ranks']}: each all-to-all is a copy")
    rows = []
    for name, run in result["results"].items():
        speed, peak = run["tokens_per_second"], run["peak_bytes_of_process"]
        used = run["model_flops_utilisation"]
        rows.append(
            [
                name,
                f"{run['parameters'] / 1e6:,.1f} M",
                f"{run['seconds']['p50']:.3f}",
                f"{speed['p50']:,.0f}",
                f"{speed['p80']:,.0f}-{speed['p20']:,.0f}",
                "-" if peak is None else f"{peak / 2**30:.1f}",
                "-" if used is None else f"{used:.1%}",
            ]
        )
    say(
        table(
            ["variant", "parameters", "s/update", "tokens/s: p50", "p20-p80", "peak GiB", "MFU"],
            rows,
        )
    )
    for name, reason in result["not_run"].items():
        say(f"{name}: not run: {reason}")
    for key, ratio in result["ratios"].items():
        say(f"tokens/s, {key}: {ratio:.2f}")
    for goal in result["goals"]:
        verdict = "reached" if goal["reached"] else "NOT reached"
        say(f"goal: {goal['goal']}: {goal['ratio']:.2f}, {verdict}")
