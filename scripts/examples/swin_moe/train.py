"""Trains SwinV2-MoE, its experts spread over the ranks; goes on from SAVE_DIR where it was.

    python scripts/examples/swin_moe/train.py --data digits --save-dir runs/digits
    torchrun --nproc-per-node 2 scripts/examples/swin_moe/train.py --data digits --save-dir runs/two
    torchrun --nproc-per-node 8 scripts/examples/swin_moe/train.py --data IMAGES --preset small \\
        --epochs 90 --warmup 10 --batch-size 1024 --amp fp16 --recompute --save-dir runs/small

IMAGES holds train/CLASS/*.jpg and val/CLASS/*.jpg. A batch is over all ranks; a set of checkpoints
is resumed by any number of them. The last lines of a run say the held-out accuracy and how well the
experts were used.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import data
import torch
from model import PRESETS, SwinConfig, SwinMoE
from torch import Tensor, nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group

from fairseq_tutel import moe, training
from fairseq_tutel.checkpoint import load_file


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=kind)
    add = parser.add_argument
    add("--data", default="digits", help="digits, or a folder with train/ and val/")
    add("--preset", default="tiny", choices=PRESETS, help="sizes of the model")
    add("--num-experts", type=int, help="of each MoE layer, 0: a dense model")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of MoELayer")
    add("--epochs", type=int, default=25, help="of the whole training")
    add("--warmup", type=float, default=2.0, help="epochs in which the learning rate grows")
    add("--batch-size", type=int, default=32, help="images of an update, over all ranks")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add("--weight-decay", type=float, default=0.05, help="of matrices")
    add("--clip-norm", type=float, default=3.0, help="of the gradient")
    add("--aux-weight", type=float, default=0.01, help="of the balance losses' sum over layers")
    add("--label-smoothing", type=float, default=0.1, help="of the loss")
    add("--amp", default="none", choices=("none", "bf16", "fp16"), help="autocast to this dtype")
    add("--recompute", action="store_true", help="blocks in the backward pass, to save memory")
    add("--seed", type=int, default=1, help="of weights, batches and augmentation")
    add("--no-augment", action="store_true", help="images are not shifted")
    add("--init", metavar="FILE", help="weights and sizes to start from, of convert.py")
    add("--save-dir", type=Path, help="checkpoint_last.pt is saved here, and gone on from")
    return parser.parse_args(argv)


def make_config(options) -> tuple[SwinConfig, dict[str, Tensor]]:
    """(the preset, or the sizes of ``--init``, with what the command line says; its weights)."""
    config, weights = PRESETS[options.preset], {}
    if options.init:
        file = load_file(options.init)
        if not file.keys() >= {"config", "model"}:
            raise ValueError(f"--init {options.init}: convert.py did not write it")
        config, weights = SwinConfig(**file["config"]), file["model"]
    config = replace(config, recompute=options.recompute, moe=dict(config.moe))
    if options.num_experts is not None:
        config = replace(config, num_experts=options.num_experts)
    for word in options.option:
        name, _, value = word.partition("=")
        with contextlib.suppress(ValueError, SyntaxError):  # else it is a word, such as quantile
            value = ast.literal_eval(value)
        config.moe[name] = value
    return config, weights


def start_from(weights: dict[str, Tensor], model: SwinMoE) -> None:
    """Load weights of ``--init``; the head stays as it is where the classes are others."""
    if len(weights["head.weight"]) != model.config.classes:
        head = {f"head.{name}": param for name, param in model.head.named_parameters()}
        weights = {**weights, **head}
    training.load_full_state_dict(model, weights)


def learning_rate(options, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up, then half a cosine down to a hundredth."""
    warm, total = options.warmup * steps_per_epoch, options.epochs * steps_per_epoch
    if step < warm:
        return options.lr * (step + 1) / warm
    done = (step - warm) / max(total - warm, 1)
    return options.lr * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


class Run:
    """One training: model, optimizer, and what is said about it by rank 0."""

    def __init__(self, options, rank: int, world_size: int, device: torch.device):
        self.options, self.rank, self.world_size, self.device = options, rank, world_size, device
        config, weights = make_config(options)
        self.images, self.held_out = data.load(options.data, config.image)
        self.config = replace(config, classes=len(self.images.names))
        torch.manual_seed(options.seed)
        self.model = SwinMoE(self.config)
        if weights:
            start_from(weights, self.model)
        self.model.to(device)
        self.layers = [m for m in self.model.modules() if isinstance(m, moe.MoELayer)]
        self.net = training.wrap_data_parallel(self.model) if world_size > 1 else self.model
        groups = self.model.decay_groups(options.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr)
        self.scaler = training.grad_scaler(enabled=options.amp == "fp16")
        self.steps = max(len(self.images) // options.batch_size, 1)
        self.use: moe.Utilisation | None = None

    def say(self, text: str) -> None:
        """Print, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def autocast(self):
        """The context of ``--amp``."""
        dtype = {"fp16": torch.float16}.get(self.options.amp, torch.bfloat16)
        return torch.autocast(self.device.type, dtype, enabled=self.options.amp != "none")

    def share(self, indices: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return indices.tensor_split(self.world_size)[self.rank]

    def step(self, number: int, indices: Tensor) -> float:
        """One update on these images of all ranks; the mean loss of this rank's."""
        torch.manual_seed(1000 * self.options.seed + number * self.world_size + self.rank)
        augment = not self.options.no_augment
        x, y = self.images.batch(self.share(indices), self.config.channels, augment)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, number, self.steps)
        with training.collect_aux(self.model) as aux, self.autocast():
            logits = self.net(x.to(self.device))
        smoothing = {"label_smoothing": self.options.label_smoothing}
        loss = nn.functional.cross_entropy(logits.float(), y.to(self.device), **smoothing)
        self.scaler.scale(loss + self.options.aux_weight * aux.loss).backward()
        self.scaler.unscale_(self.optimizer)
        training.clip_grad_norm_(self.net, self.options.clip_norm)  # with all ranks' experts
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.layers and self.layers[0].config.load_bias != "none":
            training.update_load_bias(self.model, [aux])
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Accuracy on the held-out images; ``self.use`` is how well the experts were used."""
        self.model.eval()
        right, counts = torch.zeros((), device=self.device), []
        for indices in torch.arange(len(self.held_out)).split(4 * self.options.batch_size):
            x, y = self.held_out.batch(self.share(indices), self.config.channels, False)
            with training.collect_aux(self.model) as aux, self.autocast():
                logits = self.model(x.to(self.device))
            right += (logits.argmax(1) == y.to(self.device)).sum()
            if self.layers:
                reports = [report for _, report in aux.layers]
                counts.append(moe.routing_counts(reports, self.layers[0].groups))
        self.model.train()
        sums = [torch.stack(each).sum(0) for each in zip(*counts, strict=True)]
        if self.world_size > 1:
            for each in (right, *sums):
                all_reduce(each)
        self.use = moe.utilisation(moe.RoutingCounts(*sums)) if sums else None
        return right.item() / len(self.held_out)

    def train(self) -> float:
        """Run all epochs that are left; return the held-out accuracy of the last."""
        options, first, accuracy = self.options, 0, 0.0
        path = options.save_dir and options.save_dir / "checkpoint_last.pt"
        if path and training.checkpoint_exists(path):
            state = training.load_checkpoint(path, self.model, self.optimizer)
            first, accuracy = state["epoch"], state["accuracy"]
            if state.get("scaler"):
                self.scaler.load_state_dict(state["scaler"])
            self.say(f"resumed after epoch {first}: held-out accuracy {100 * accuracy:.2f} %")
        for epoch in range(first, options.epochs):
            generator = torch.Generator().manual_seed(1000 * options.seed + epoch)
            order = torch.randperm(len(self.images), generator=generator)
            begin, losses = time.perf_counter(), []
            for number in range(self.steps):
                indices = order[number * options.batch_size : (number + 1) * options.batch_size]
                losses.append(self.step(epoch * self.steps + number, indices))
            accuracy = self.evaluate()
            took = time.perf_counter() - begin
            self.say(
                f"epoch {epoch + 1}/{options.epochs} | loss {sum(losses) / len(losses):.4f} | "
                f"held-out accuracy {100 * accuracy:.2f} % | {took:.1f} s"
            )
            if path:
                state = {"epoch": epoch + 1, "accuracy": accuracy}
                state["scaler"] = self.scaler.state_dict()
                training.save_checkpoint(path, self.model, self.optimizer, state)
        return accuracy


def main(argv=None) -> int:
    """Exit code 2 for data that cannot be read."""
    options = parse(argv)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:  # before the model is built: its experts are then spread over the ranks
        init_process_group()
    try:
        run = Run(options, rank, world_size, device)
    except ValueError as error:
        sys.stderr.write(f"train.py: error: {error}\n")
        return 2
    held = sum(p.numel() for p in run.model.parameters()) / 1e6
    run.say(
        f"{len(run.images)} images of {len(run.images.names)} classes, {len(run.held_out)} held "
        f"out; {held:.2f}M parameters on this rank, {len(run.layers)} MoE layers"
    )
    accuracy = run.train()
    run.say(f"held-out accuracy {100 * accuracy:.2f} %")
    if run.use is not None:
        drop, load = run.use.drop.mean(), run.use.load.mean()
        run.say(f"choices dropped {drop:.1f} %, mean load / largest {load:.0f} %, mean over layers")
    if world_size > 1:
        destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
