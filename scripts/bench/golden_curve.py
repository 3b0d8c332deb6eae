"""Repeats a golden run of Meta's implementation, and draws README's figure from the two.

    python scripts/bench/golden_curve.py              # run, record, draw; about a minute on a CPU
    python scripts/bench/golden_curve.py --draw-only  # from the recorded results

tests/golden holds what fairseq's branch ``moe`` logged (two ranks, top-2, 20 updates). The same
arguments go to stock fairseq with this plugin; its log goes to
scripts/bench/results/golden-top2_world2.json. The figure has both losses, and the layer's time
beside the dense formulation's, from scripts/bench/results/layer-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
import torch
from record import ROOT, describe_run, quiet_logs, say

RUN, RANKS, UPDATES = "top2_world2", 2, 20
GOLDEN = ROOT / "tests" / "golden"
RESULTS = ROOT / "scripts" / "bench" / "results"
RECORD = RESULTS / f"golden-{RUN}.json"
FIGURE = RESULTS / "figures" / "overview.png"
_BARS = (
    ("dense", "dense S x E x C\nformulation"),
    ("torch", "this layer"),
    ("products", "its matrix\nproducts alone"),
)


def command(save_dir: Path) -> list[str]:
    """The golden run's arguments for this plugin, from the weights that it began with."""
    data, *words = (GOLDEN / RUN / "args.txt").read_text(encoding="utf-8").split()
    words[words.index("--arch") + 1] = "transformer_lm_gpt_moe"
    return [
        *(sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", str(RANKS), "--"),
        *("fairseq-train", str(GOLDEN / data), *words, "--user-dir", str(ROOT / "fairseq_tutel")),
        *("--required-batch-size-multiple", "1", "--lr", "0.002", "--max-update", str(UPDATES)),
        *("--restore-file", str(GOLDEN / RUN / "init" / "checkpoint_last.pt")),
        *("--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler"),
        *("--no-save", "--disable-validation", "--save-dir", str(save_dir)),
    ]


def repeat() -> dict[str, Any]:
    """Train; the result as it is recorded.

    Raises:
        RuntimeError: the run failed; the message ends with its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(Path(folder)),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    log = done.stdout + done.stderr
    rows = [json.loads(row) for row in re.findall(r"\| train \| (\{.*\})", log)]
    if done.returncode or len(rows) != UPDATES:
        what = f"exit code {done.returncode} after {len(rows)} updates"
        raise RuntimeError(f"{what}:\n{log}")
    losses = [float(row["train_loss"]) for row in rows]
    result = describe_run("golden", torch.device("cpu"), RANKS)
    return {**result, "preset": RUN, "settings": {"updates": UPDATES}, "results": {"loss": losses}}


def draw(ours: dict[str, Any], layer: dict[str, Any], path: Path) -> None:
    """Loss beside Meta's own run; the layer's time beside the dense formulation's."""
    pyplot = figures.load_pyplot()
    golden = json.loads((GOLDEN / RUN / "log.json").read_text(encoding="utf-8"))["train"]
    updates = range(1, UPDATES + 1)
    figure, (curve, bars) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    curve.plot(
        updates,
        [row["loss"] for row in golden],
        color=figures.COLORS["dense"],
        linewidth=7,
        label="Meta's implementation (fairseq, branch moe)",
    )
    curve.plot(
        updates,
        ours["results"]["loss"],
        color=figures.COLORS["torch"],
        marker="o",
        markersize=3.5,
        linewidth=1.2,
        label="this plugin on stock fairseq",
    )
    curve.set(title="The same run: 2 ranks, top-2", xlabel="update", ylabel="loss (bits per token)")
    curve.set_xticks([1, 5, 10, 15, 20])
    curve.legend(frameon=False)

    cases = [(name, label) for name, label in _BARS if name in layer["results"]]
    values = [layer["results"][name]["ms"]["both"]["p50"] for name, _ in cases]
    drawn = bars.bar(
        [label for _, label in cases],
        values,
        width=0.6,
        color=[figures.COLORS[name] for name, _ in cases],
    )
    bars.bar_label(drawn, [f"{value:,.0f} ms" for value in values], padding=2)
    sizes = layer["settings"]
    bars.set_ylim(0, 1.12 * max(values))
    bars.set(
        title=f"One MoE layer, forward and backward ({values[0] / values[1]:.1f} times faster)",
        ylabel=f"ms, {sizes['tokens']} tokens, {sizes['experts']} experts, CPU",
    )
    figures.save(pyplot, figure, path)


def main() -> int:
    """Exit code 1 where the run fails."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--draw-only", action="store_true", help="from the recorded result")
    options.add_argument("--figure", type=Path, default=FIGURE, help="(default: %(default)s)")
    options = options.parse_args()
    quiet_logs()
    if not options.draw_only:
        try:
            result = repeat()
        except RuntimeError as error:
            say(f"error: {error}")
            return 1
        RECORD.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say(f"wrote {RECORD.relative_to(ROOT)}")
    layer = json.loads((RESULTS / "layer-cpu.json").read_text(encoding="utf-8"))
    draw(json.loads(RECORD.read_text(encoding="utf-8")), layer, options.figure)
    say(f"drew {options.figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
