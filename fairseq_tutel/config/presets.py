"""Presets: options that belong together (``--moe-preset``, ``MoELayer(preset=...)``).

An option that is given wins over the preset's.
"""

from collections.abc import Mapping
from typing import Any

# fields of MoEConfig by preset
PRESETS: dict[str, dict[str, Any]] = {
    # as Meta's code: capacity is limited, and the gate loss balances the experts
    "meta": {"second_expert_policy": "sampling", "capacity_factor": 1.0, "load_bias": "none"},
    # recommended by a study (scripts/bench/results/README.md): nothing is dropped, and a bias
    # balances the experts
    "balanced": {"second_expert_policy": "all", "capacity_factor": 0.0, "load_bias": "quantile"},
}
# weight of the gate loss by preset; without one a criterion or model has its own
GATE_LOSS_WEIGHTS = {"balanced": 0.001}


def with_preset(preset: str, given: Mapping[str, Any], num_experts: int) -> dict[str, Any]:
    """Return fields of MoEConfig: those that are given, over those of a preset.

    A preset sets no load bias where there can be none: if every token takes all experts, or if the
    next choices are drawn.

    Raises:
        ValueError: there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is unknown; choose one of {', '.join(PRESETS)}")
    values = {**PRESETS[preset], **given}
    top_k = values.get("top_k", 2)
    takes_all = top_k >= num_experts + values.get("null_experts", 0)
    if takes_all or top_k > 1 and str(values["second_expert_policy"]) != "all":
        values["load_bias"] = given.get("load_bias", "none")
    return values
