"""Reads what training wrote: fairseq's log lines and the plugin's expert loads."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

UTILISATION = ("moe_util_slot", "moe_util_load", "moe_util_rank", "moe_drop", "moe_dead")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)"
_TRAIN = re.compile(r"\| INFO \| train_inner \| (epoch .*)")
_VALID = re.compile(r"\| INFO \| valid \| (epoch .*)")
_PROGRESS = re.compile(r"(epoch \d+:)\s+(\d+) / (\d+)")
_RESUMED = re.compile(r"Loaded checkpoint .* \(epoch \d+ @ (\d+) updates\)")


@dataclass
class Curves:
    """Metrics over updates; ``loss`` is the cross-entropy in bits per token, without gate loss.

    Attributes:
        train: update -> (bits per token, tokens per second) since the line before.
        valid: update -> (bits per token, perplexity).
        used: update -> utilisation of the experts (``moe_util_slot`` and so on) since the line
            before, per forward pass of all ranks.
        resumed: updates at which training went on from a checkpoint.
    """

    train: dict[int, tuple[float, float]] = field(default_factory=dict)
    valid: dict[int, tuple[float, float]] = field(default_factory=dict)
    used: dict[int, dict[str, float]] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)


def train_values(line: str) -> dict[str, float] | None:
    """Metrics of a progress line of fairseq, or None where the line is something else."""
    found = _TRAIN.search(line)
    pattern = rf"(\w+)=({_NUMBER})(?=,|$)"
    return {k: float(v) for k, v in re.findall(pattern, found[1])} if found else None


def valid_values(line: str) -> dict[str, float] | None:
    """Metrics of a validation line of fairseq, or None where the line is something else."""
    found = _VALID.search(line)
    pattern = rf"(\w+) ({_NUMBER})(?= \||$)"
    return {k: float(v) for k, v in re.findall(pattern, found[1])} if found else None


def resumed_at(line: str) -> int | None:
    """The update of the checkpoint whose loading this line reports."""
    found = _RESUMED.search(line)
    return int(found[1]) if found else None


def progress(line: str) -> str | None:
    """fairseq's progress line without time stamps, shortened to the metrics worth watching."""
    values, found = train_values(line), _PROGRESS.search(line)
    if values is None or found is None:
        return None
    parts = [f"{found[1]} {found[2]:>5} / {found[3]}"]
    for name in ("loss", "ppl", "wps", "num_updates", "moe_gate_loss", "moe_drop", "lr", "gnorm"):
        if name in values:
            value = values[name]
            parts.append(f"{name}={value:.0f}" if value >= 1000 else f"{name}={value:.4g}")
    return f"{parts[0]} {', '.join(parts[1:])}"


def read_curves(log: Path) -> Curves:
    """Collect the curves of a training log; of an update trained twice, the last counts."""
    curves = Curves()
    for line in log.read_text(encoding="utf-8").splitlines():
        if (values := train_values(line)) is not None:
            loss = values.get("inner_loss", values["loss"])
            update = int(values["num_updates"])
            curves.train[update] = (loss, values["wps"])
            curves.used[update] = {name: values[name] for name in UTILISATION if name in values}
        elif (values := valid_values(line)) is not None:
            loss = values.get("inner_loss", values["loss"])
            curves.valid[int(values["num_updates"])] = (loss, values["ppl"])
        elif (update := resumed_at(line)) is not None:
            curves.resumed.append(update)
    return curves


def late_utilisation(curves: Curves) -> dict[str, float]:
    """Mean utilisation over the last quarter of the lines."""
    late = [curves.used[update] for update in sorted(curves.used)]
    late = late[-max(1, len(late) // 4) :]
    return {
        name: round(sum(line[name] for line in late) / len(late), 1)
        for name in UTILISATION
        if all(name in line for line in late)
    }


def read_expert_load(file: Path) -> tuple[list[int], dict[str, list[list[int]]]]:
    """Updates, and for every MoE layer the tokens routed to each expert up to each update."""
    records = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record["update"]] = record["layers"]
    updates = sorted(records)
    layers = sorted({layer for loads in records.values() for layer in loads}, key=int)
    return updates, {layer: [records[u][layer] for u in updates] for layer in layers}
