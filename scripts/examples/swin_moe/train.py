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
from typing import Any

import data
import torch
from model import PRESETS, SwinConfig, SwinMoE
from torch import Tensor, nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

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
        wrap = training.wrap_data_parallel if self.layers else DistributedDataParallel
        self.net = wrap(self.model) if world_size > 1 else self.model
        groups = self.model.decay_groups(options.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr)
        self.scaler = training.grad_scaler() if options.amp == "fp16" else None
        self.steps = max(len(self.images) // options.batch_size, 1)
        self.use: moe.Utilisation | None = None

    def say(self, text: str) -> None:
        """Print, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def autocast(self):
        """The context of ``--amp``."""
        if self.options.amp == "none":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.options.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype)

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
        with self.collecting() as aux, self.autocast():
            logits = self.net(x.to(self.device))
        smoothing = {"label_smoothing": self.options.label_smoothing}
        loss = nn.functional.cross_entropy(logits.float(), y.to(self.device), **smoothing)
        total = loss + self.options.aux_weight * aux.loss if aux is not None else loss
        self.update(total)
        if aux is not None and self.layers[0].config.load_bias != "none":
            training.update_load_bias(self.model, [aux])
        return loss.item()

    def update(self, loss: Tensor) -> None:
        """Backward pass, clipping over all experts and dense weights, optimizer."""
        scaler, norm = self.scaler, self.options.clip_norm
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.layers:
            training.clip_grad_norm_(self.net, norm)
        else:
            nn.utils.clip_grad_norm_(self.net.parameters(), norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Accuracy on the held-out images; ``self.use`` is how well the experts were used."""
        self.model.eval()
        right, counts = torch.zeros((), device=self.device), []
        for indices in torch.arange(len(self.held_out)).split(4 * self.options.batch_size):
            x, y = self.held_out.batch(self.share(indices), self.config.channels, False)
            with self.collecting() as aux, self.autocast():
                logits = self.model(x.to(self.device))
            right += (logits.argmax(1) == y.to(self.device)).sum()
            if aux is not None:
                reports = [report for _, report in aux.layers]
                counts.append(moe.routing_counts(reports, self.layers[0].groups))
        self.model.train()
        sums = [torch.stack(each).sum(0) for each in zip(*counts, strict=True)]
        if self.world_size > 1:
            for each in (right, *sums):
                all_reduce(each)
        self.use = moe.utilisation(moe.RoutingCounts(*sums)) if sums else None
        return right.item() / len(self.held_out)

    def collecting(self):
        """The aux losses of a forward pass; None of a dense model."""
        return training.collect_aux(self.model) if self.layers else contextlib.nullcontext()

    def path(self) -> str:
        """Return the path of the checkpoint."""
        return str(self.options.save_dir / "checkpoint_last.pt")

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint; of a dense model, which no rank holds a part of, by torch alone."""
        if self.layers:
            training.save_checkpoint(self.path(), self.model, self.optimizer, state)
        elif self.rank == 0:
            self.options.save_dir.mkdir(parents=True, exist_ok=True)
            parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**parts, "extra": state}, self.path())

    def load(self) -> dict[str, Any]:
        """Go on from what :meth:`save` wrote; its ``state``."""
        if self.layers:
            return training.load_checkpoint(self.path(), self.model, self.optimizer)
        file = load_file(self.path())
        self.model.load_state_dict(file["model"])
        self.optimizer.load_state_dict(file["optimizer"])
        return file["extra"]

    def train(self) -> float:
        """All epochs that are left; the held-out accuracy of the last."""
        options, first, accuracy = self.options, 0, 0.0
        if options.save_dir and training.checkpoint_exists(self.path()):
            state = self.load()
            first, accuracy = state["epoch"], state["accuracy"]
            if self.scaler is not None and "scaler" in state:
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
            if options.save_dir:
                state = {"epoch": epoch + 1, "accuracy": accuracy}
                if self.scaler is not None:
                    state["scaler"] = self.scaler.state_dict()
                self.save(state)
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
