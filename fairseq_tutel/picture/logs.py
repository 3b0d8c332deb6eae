"""Read fairseq's log lines, in the formats simple and json."""

import re
from dataclasses import dataclass, field
from pathlib import Path

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)"
_EPOCH = re.compile(r'\bepoch"?:? \d+')
# loss=8.02 and loss 8.02 of --log-format simple, "loss": "8.02" of json
_METRIC = re.compile(rf'(\w+)"?(?:[= ]|: )"?({_NUMBER})"?(?=[,}}]| \||$)')
_BEGIN = "num. shared model params"  # printed at every start of fairseq-train
_RESUMED = re.compile(r"Loaded checkpoint .* \(epoch \d+ @ (\d+) updates\)")


@dataclass
class Curves:
    """Metrics by update and name; ``loss`` is the cross-entropy in bits per token."""

    # the last line counts if an update was made again after a resume
    train: dict[int, dict[str, float]] = field(default_factory=dict)
    valid: dict[int, dict[str, float]] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)  # updates after which a checkpoint was loaded


def read_metrics(line: str) -> tuple[str, dict[str, float]] | None:
    """Return "train_inner", "train" or "valid", and the metrics of a line that has some."""
    if not _EPOCH.search(line):
        return None
    found = {name: float(value) for name, value in _METRIC.findall(line)}
    kind = "train_inner"
    if "valid_num_updates" in found or " valid on " in line:
        kind = "valid"
    elif "train_num_updates" in found or re.search(r"epoch \d+ \|", line):
        kind = "train"
    # a prefix on all names of a line, and not that of train_wall
    prefix = next((p for p in ("train_", "valid_") if p + "num_updates" in found), "")
    values = {name.removeprefix(prefix): value for name, value in found.items()}
    if "num_updates" not in values or "loss" not in values:
        return None
    return kind, {**values, "loss": values.get("inner_loss", values["loss"])}


def resumed_at(line: str) -> int | None:
    """Return the update of the checkpoint whose loading this line reports, or None."""
    found = _RESUMED.search(line)
    return int(found[1]) if found else None


def read_log(log: Path) -> Curves:
    """Read the curves of a training log."""
    curves, epochs, last, began = Curves(), {}, 0, False
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if (found := read_metrics(line)) is not None:
            kind, values = found
            if began and last:  # a file of --log-file does not say from which update
                curves.resumed.append(min(last, int(values["num_updates"])))
            last, began = int(values["num_updates"]), False
            of = {"train_inner": curves.train, "train": epochs, "valid": curves.valid}[kind]
            of[last] = values
        elif (update := resumed_at(line)) is not None:
            began = False
            curves.resumed += [update] * (update > 0)
        elif _BEGIN in line:
            began = True
    curves.train = curves.train or epochs  # without lines within an epoch: its means
    return curves


def newest_log(folder: Path) -> Path | None:
    """Return the newest .log file of a folder, or None."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1] if logs else None
