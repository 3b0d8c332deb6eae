"""What compressing the exchange costs in validation loss: the quickstart's model on its data.

    python scripts/bench/wire_loss.py --output runs/wire-loss.json

Trains scripts/quickstart's language model, fewer and smaller updates, on two CPU ranks, with and
without wire formats, several seeds of each; a difference counts if it exceeds the spread of the
seeds. Draws the result beside the JSON file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from record import ROOT, describe_run, say, table, write_json

sys.path.append(str(ROOT / "scripts" / "quickstart"))

import commands  # noqa: E402
import metrics  # noqa: E402
import tokenizer  # noqa: E402
from corpus import build_corpus  # noqa: E402
from shell import run  # noqa: E402

VARIANTS = {
    "same": ["--moe-wire", "same"],
    "fp8, bf16 gradients": ["--moe-wire", "fp8", "--moe-wire-back", "fp8"],
    "fp8": ["--moe-wire", "fp8", "--moe-wire-back", "fp8", "--moe-wire-grad", "fp8"],
}
SAMPLES_PER_RANK = 4


def prepare(folder: commands.Folder) -> None:
    """The quickstart's data, unless it is there already."""
    if (folder.data / "dict.txt").exists():
        return
    shutil.rmtree(folder.root, ignore_errors=True)
    for each in (folder.text, folder.tokenizer.parent, folder.pieces, folder.root / "logs"):
        each.mkdir(parents=True)
    build_corpus([]).write(folder.text)
    tokenizer.train(folder.text / "train.txt", folder.tokenizer)
    names = [f"{side}.txt" for side in ("train", "valid", "test")]
    tokenizer.encode(folder.tokenizer, {folder.text / n: folder.pieces / n for n in names})
    run(commands.preprocess(folder), folder.log("preprocess"))


def train(folder: commands.Folder, variant: str, seed: int, updates: int) -> dict[str, Any]:
    """Validation loss (bits per token) at the end, and the relative error of each leg."""
    command = commands.train(folder, commands.Machine("cpu", 2), updates, updates)
    command += ["--batch-size", str(SAMPLES_PER_RANK), "--seed", str(seed), "--no-save"]
    command += ["--validate-interval-updates", str(updates), "--moe-load-log-interval", "0"]
    values: dict[str, float] = {}

    def on_line(line: str) -> None:
        values.update(metrics.train_values(line) or {})
        if (found := metrics.valid_values(line)) is not None:
            values["valid_loss"] = found["inner_loss"]

    run(command + VARIANTS[variant], folder.log(f"{variant}-{seed}"), on_line)
    errors = {k: v for k, v in values.items() if k.startswith("moe_wire_error")}
    return {"variant": variant, "seed": seed, "valid_loss": values["valid_loss"], "errors": errors}


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means, differences to 'same', and the spread of the seeds of 'same' (largest - smallest)."""
    losses = {name: [r["valid_loss"] for r in rows if r["variant"] == name] for name in VARIANTS}
    means = {name: sum(x) / len(x) for name, x in losses.items() if x}
    return {
        "spread": max(losses["same"]) - min(losses["same"]),
        "mean": means,
        "difference": {name: mean - means["same"] for name, mean in means.items()},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """One point per run."""
    pyplot = figures.load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    same = [row["valid_loss"] for row in result["results"] if row["variant"] == "same"]
    axis.axvspan(min(same), max(same), color="#d9dde3", label="spread of the seeds of 'same'")
    for row in result["results"]:
        axis.plot(row["valid_loss"], row["variant"], "o", color=figures.COLORS["torch"])
    axis.set_xlabel(f"validation loss, bits per token\n{figures.caption(result)}", fontsize=8)
    axis.margins(y=0.3)
    axis.legend(frameon=False, fontsize=8)
    figures.save(pyplot, figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--updates", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of each variant (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/wire-loss.json"), metavar="FILE")
    parser.add_argument("--data", type=Path, default=Path("runs/wire-loss"), metavar="FOLDER")
    options = parser.parse_args(argv)
    output = options.output.absolute()
    os.chdir(ROOT)  # so that `--user-dir fairseq_tutel` is found
    folder = commands.Folder(options.data)
    prepare(folder)
    rows = []
    for seed in range(1, options.seeds + 1):
        for variant in VARIANTS:
            rows.append(train(folder, variant, seed, options.updates))
            say(f"seed {seed}, {variant}: {rows[-1]['valid_loss']:.3f} bits per token")
    result = {
        **describe_run("wire-loss", torch.device("cpu"), world_size=2),
        "settings": {
            "updates": options.updates,
            "tokens_per_update": 2 * SAMPLES_PER_RANK * commands.TOKENS_PER_SAMPLE,
            "variants": {name: " ".join(words) for name, words in VARIANTS.items()},
        },
        "results": rows,
        "comparison": compare(rows),
    }
    write_json(result, output)
    if figures.has_matplotlib():
        draw(result, output.with_suffix(".png"))
    found = result["comparison"]
    lines = [(n, f"{m:.4f}", f"{found['difference'][n]:+.4f}") for n, m in found["mean"].items()]
    say(table(("wire", "mean loss", "difference"), lines))
    say(f"spread of the seeds of 'same': {found['spread']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
