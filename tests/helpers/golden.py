"""Runs of Meta's own code in tests/golden: their arguments, and what a repetition must equal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from helpers.assertions import rms_ratio
from helpers.commands import ROOT, logged
from helpers.sets import member

GOLDEN = Path(__file__).parents[1] / "golden"
UPDATES = 20
# by a run's options: with one expert per token, and in validation without a capacity
LEFT_AT_0 = (
    "overflow_expert1", "overflow_expert2", "expert2_balance_top", "expert2_balance_bottom",
    "unused_expert2_count",
)  # fmt: skip
# of options that the runs do not have: always 0 there
OF_LANGUAGES = ("cmr_", "median_prefix_count_")
# one unit of the last digit that is logged
UNIT = {"moe_gate_loss": 1e-5, "ppl": 1e-2}
# What fairseq 0.12.2 saves and main does not: a buffer without content, as Meta's branches.
_OF_HOSTS = re.compile(r"embed_positions\._float_tensor")
# Updates in which all digits are the same on every CPU. Later, other rounding may send a token
# whose two best experts are nearly equal to the other one.
SAME_DIGITS = 10


def arguments(run: str, arch: str, backend: str, save_dir: Path) -> list[str]:
    """The run's own arguments, with what its notes say about how it was started."""
    data, *words = (GOLDEN / run / "args.txt").read_text().split()
    for option, value in (("--arch", arch), ("--ddp-backend", backend)):
        words[words.index(option) + 1] = value
    return [
        str(GOLDEN / data), *words, "--user-dir", str(ROOT / "fairseq_tutel"),
        "--required-batch-size-multiple", "1", "--lr", "0.002", "--max-update", str(UPDATES),
        "--restore-file", str(GOLDEN / run / "init" / "checkpoint_last.pt"), "--reset-optimizer",
        "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler", "--no-epoch-checkpoints",
        # an epoch is one update
        "--save-interval", str(UPDATES), "--validate-interval", str(UPDATES),
        "--save-dir", str(save_dir),
    ]  # fmt: skip


def weights(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Every tensor of a set; an expert's key says which rank's file holds it."""
    found = {}
    for part in ("shared", *(f"rank-{rank}" for rank in range(ranks))):
        state = torch.load(member(folder / "checkpoint_last.pt", part), weights_only=False)["model"]
        found.update({f"{part}: {key}": value for key, value in state.items()})
    return found


def assert_same_metrics(got: dict, want: dict, units: float) -> None:
    """Every metric of the reference, to the digits that it logged; what is not logged is 0."""
    for name in set(want) - {"epoch"}:
        unit = UNIT.get(name, 1e-3)
        assert name in got or name in LEFT_AT_0 or name.startswith(OF_LANGUAGES), name
        error, limit = abs(got.get(name, 0) - want[name]), units * unit
        if want["epoch"] > SAME_DIGITS:
            limit += 1e-2 * abs(want[name])
        assert error <= limit, (want["epoch"], name, got.get(name), want[name])


def assert_same_run(
    run: str, ranks: int, log: str, save_dir: Path, units: float, weight_error: float
) -> set[str]:
    """Compare the metrics of every update, those of the last validation, and the weights.

    Adam makes a step of full size of a gradient that is nearly 0, and a ReLU switches where its
    input is. Noise of one ulp in the gradients (1e-7 of a tensor's largest) moves all weights by
    up to 3e-4 of their way and a single tensor by up to 5e-4. A clip norm of 1.001 in place of 1
    moves them by 1.3e-3 and 2e-3.

    Args:
        units: by how many of its last logged digit a metric may differ.
        weight_error: limit of the error of all weights, relative to their way; twice that for the
            RMS error of a single tensor, relative to the tensor.

    Returns:
        The names of all weights.
    """
    golden = json.loads((GOLDEN / run / "log.json").read_text())
    updates = logged(log, "train")
    assert len(updates) == len(golden["train"]) == UPDATES
    for got, want in zip(updates, golden["train"], strict=True):
        assert_same_metrics(got, want, units)
    (valid,) = logged(log, "valid")
    assert_same_metrics(valid, golden["valid_after_last_update"], units)

    want, got = weights(GOLDEN / run / "final", ranks), weights(save_dir, ranks)
    start = weights(GOLDEN / run / "init", ranks)
    names, saved = ({key for key in keys if not _OF_HOSTS.search(key)} for keys in (want, got))
    assert names == saved
    # its true gradient is zero; Adam amplifies what rounding leaves of it
    trained = {key for key in names if not key.endswith("k_proj.bias")}
    for key in trained:
        assert rms_ratio(got[key], want[key]) < 2 * weight_error, key
    errors, ways = (torch.cat([(want[key] - other[key]).flatten() for key in sorted(trained)])
                    for other in (got, start))  # fmt: skip
    assert errors.norm() / ways.norm() < weight_error
    moved = sum(rms_ratio(start[key], want[key]) > 1e-3 for key in trained)
    assert moved > 0.95 * len(trained)
    return names
