"""A dense model and one with experts, trained on the same data for as many updates."""

import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from steps import EXPERTS, RANKS, Commands, QuickstartError, say

from fairseq_tutel import picture

MODELS = {"dense": 0, "moe": 2}  # --moe-freq
SIZES = """--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 64 --decoder-embed-dim 64
    --encoder-ffn-embed-dim 128 --decoder-ffn-embed-dim 128 --encoder-attention-heads 4
    --decoder-attention-heads 4 --dropout 0 --attention-dropout 0 --activation-dropout 0
    --user-dir fairseq_tutel --required-batch-size-multiple 1
    --moe-second-expert-policy all --moe-load-log-interval 10"""


class Recipe(NamedTuple):
    """Model, data and length of a training."""

    task: str  # options of training and generation
    train: str
    updates: int
    loss: str  # name in the log, without gate loss and smoothing
    writes: bool  # fairseq-generate can write held-out texts


RECIPES = {"speech": Recipe(
    "--task speech_to_text --config-yaml config.yaml",
    f"""--arch s2t_transformer_moe --conv-channels 64 --max-tokens {2000 // RANKS}
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1""",
    400, "nll_loss", True,
), "bart": Recipe(
    """--task denoising --mask 0.3 --mask-length span-poisson --replace-length 1
    --sample-break-mode complete --tokens-per-sample 128""",
    f"""--arch bart_base_moe --max-source-positions 1024 --max-target-positions 1024
    --criterion cross_entropy --max-tokens {4096 // RANKS}""",
    300, "loss", False,
)}  # fmt: skip


class Comparison(Commands):
    """Trainings of both models, and what they found out."""

    def __init__(self, folder: Path, updates: int, recipe: Recipe, seeds: int):
        super().__init__(folder, updates)
        self.recipe, self.seeds = recipe, range(1, seeds + 1)
        self.losses: dict[str, list[float]] = {name: [] for name in MODELS}

    def train(self, name: str, seed: int) -> None:
        """Train one model, and note its last validation loss."""
        recipe = self.recipe
        options = f"{recipe.task} {recipe.train} {SIZES} --moe-freq {MODELS[name]}"
        how = {"warmup": 60, "validations": 4, "lines": 8, "loss": recipe.loss}
        log = self.train_up_to(self.updates, options, **how, run=f"-{name}-{seed}", seed=seed)
        lines = [values for kind, values in filter(None, map(picture.read_metrics, log))
                 if kind == "valid" and recipe.loss in values]  # fmt: skip
        self.losses[name].append(lines[-1][recipe.loss])

    def generate(self) -> None:
        """Let the first model with experts write what it heard."""
        command = f"""fairseq-generate data {self.recipe.task} --user-dir fairseq_tutel
            --path checkpoints-moe-1/checkpoint_last.pt --gen-subset test --beam 4
            --max-tokens 4000 --num-workers 0"""
        found: dict[str, dict[str, str]] = {"T": {}, "D": {}}
        for line in self.run("generate", command):
            if match := re.match(r"([TD])-(\d+)\t(?:-?[\d.]+\t)?(.*)", line):
                found[match[1]][match[2]] = match[3]
        right = [found["T"][number] == text for number, text in found["D"].items()]
        say(f"      {100 * statistics.mean(right):.1f} % of {len(right)} are right to the word")
        for number in list(found["D"])[:3]:
            say(f"      data:  {found['T'][number]}\n      model: {found['D'][number]}\n")

    def report(self) -> float:
        """Print the table; return the mean loss of the dense model minus that with experts."""
        say(f"\nvalidation loss after {self.updates} updates (bits per token)")
        for name, losses in self.losses.items():
            each = "  ".join(f"{loss:.3f}" for loss in losses)
            say(f"{name:<6} {statistics.mean(losses):.3f}   (seeds 1 to {len(losses)}: {each})")
        dense, moe = map(statistics.mean, self.losses.values())
        return dense - moe


def compare(quick: Comparison, data: list[tuple]) -> None:
    """Follow a recipe; ``data`` are the steps that make the data.

    Raise QuickstartError if a step fails, or if experts do not help in a whole run.
    """
    trainings = [
        (f"Train the model {name}, seed {seed}", quick.train, name, seed)
        for seed in quick.seeds
        for name in MODELS
    ]
    written = [("Write held-out texts: fairseq-generate", quick.generate)]
    quick.follow([*data, *trainings, *(written if quick.recipe.writes else [])])
    gain = quick.report()
    say(f"\n{EXPERTS} experts in each MoE layer, on {RANKS} ranks")
    say(f"{time.monotonic() - quick.begin:.0f} s; everything: {quick.folder}")
    if quick.updates >= quick.recipe.updates and not gain >= 0:
        raise QuickstartError(f"with experts the loss is {-gain:.3f} higher, not lower")
