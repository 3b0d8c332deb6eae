"""A fairseq trainer on a tiny dummy task inside a test's process, one per rank, and its batches."""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from omegaconf import DictConfig
from torch import Tensor

from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.fairseq.models.conditional_routing import ConditionalRoutingOptions
from fairseq_tutel.integrations.fairseq.options.options import MoEOptions

VOCABULARY = 32  # 4 special symbols included
LENGTH = 8
# two layers, the second one sparse
TINY = """
    --task dummy_lm --dict-size 28 --tokens-per-sample 8 --cpu --seed 3 --no-save
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24
    --decoder-attention-heads 2 --dropout 0 --attention-dropout 0
    --criterion moe_cross_entropy --moe-gate-loss-wt 0.1 --moe-gate-loss-combine-method sum
    --optimizer adam --lr 0.01 --batch-size 4 --ddp-backend legacy_ddp
"""
ARCH = {
    True: ["--arch", "transformer_lm_gpt_moe", "--moe-second-expert-policy", "all"],
    False: ["--arch", "transformer_lm_gpt"],
}


def make_config(*given: str, moe: bool = True) -> DictConfig:
    """fairseq's config for the tiny model, or (``moe=False``) for its own dense one."""
    parser = options.get_training_parser()
    given = [*TINY.split(), *ARCH[moe], *given]
    return convert(options.parse_args_and_arch(parser, input_args=given))


_CONVERTED: dict[tuple[object, ...], DictConfig] = {}
_CHOICES = ("arch", "task", "criterion", "optimizer", "lr_scheduler", "bpe", "tokenizer", "scoring")
# those of experts, which are among the arguments only where they are given
_OWN = {*MoEOptions.__dataclass_fields__, *ConditionalRoutingOptions.__dataclass_fields__}


def convert(args: argparse.Namespace) -> DictConfig:
    """What fairseq makes of parsed arguments; Hydra composes once for those of the same names.

    Composing takes a third of a second. It is done without the options of experts. All arguments
    are put where fairseq's overrides would put them: into the field of their name, in every group
    that has one.
    """
    common = {name: value for name, value in vars(args).items() if name not in _OWN}
    choices = *(getattr(args, name, None) for name in _CHOICES), *sorted(common)
    if choices not in _CONVERTED:
        _CONVERTED[choices] = convert_namespace_to_omegaconf(argparse.Namespace(**common))
    cfg = copy.deepcopy(_CONVERTED[choices])
    for group in cfg.values():
        if isinstance(group, argparse.Namespace):  # of a class without a dataclass: all arguments
            vars(group).update(vars(args))
        for key in group if isinstance(group, DictConfig) else ():
            if hasattr(args, key):
                group[key] = getattr(args, key)
    return cfg


def make_trainer(cfg: DictConfig, batch: dict | None = None) -> Trainer:
    """What fairseq-train builds before its loop. Collective where there are several ranks.

    ``batch``: the dummy one, of other data than :func:`make_batch` makes.
    """
    for name in ("fairseq", "fairseq_tutel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cfg = copy.deepcopy(cfg)
    distributed = cfg.distributed_training
    distributed.distributed_rank, distributed.distributed_world_size = process_world()
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(cfg.common.seed)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    trainer.begin_epoch(1)
    trainer.reset_dummy_batch(batch or make_batch(0))
    return trainer


def make_batch(seed: int, sentences: int = 4, lengths: Sequence[int] | None = None) -> dict:
    """Random tokens as fairseq batches them, padded; some are frequent, so experts overflow."""
    generator = torch.Generator().manual_seed(1000 + seed)
    lengths = [LENGTH] * sentences if lengths is None else lengths
    width = max(lengths)
    rare = torch.randint(4, VOCABULARY, (len(lengths), width + 1), generator=generator)
    frequent = torch.randint(4, 7, rare.shape, generator=generator)
    tokens = torch.where(torch.rand(rare.shape, generator=generator) < 0.5, frequent, rare)
    source, target = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row, length in enumerate(lengths):
        source[row, length:] = target[row, length:] = 1  # padding
    return {
        "id": torch.arange(len(lengths)),
        "net_input": {"src_tokens": source, "src_lengths": torch.tensor(lengths)},
        "target": target,
        "nsentences": len(lengths),
        "ntokens": sum(lengths),
    }


def save(trainer: Trainer, path, steps: int = 3, **extra) -> None:
    """A set in the middle of the first epoch, after so many steps through the data."""
    position = {"version": 2, "epoch": 1, "iterations_in_epoch": steps, "shuffle": False}
    trainer.save_checkpoint(str(path), {"train_iterator": position, "val_loss": None, **extra})


def own_batches(update: int, total: int) -> list[dict]:
    """This rank's share of the ``total`` batches of an update: as many per rank, in rank order."""
    rank, world_size = process_world()
    share = total // world_size
    return [make_batch(100 * update + rank * share + i) for i in range(share)]


def named(trainer: Trainer, values: Iterable[tuple[str, Tensor]] | None = None) -> dict:
    """Copies of weights and load biases (or other values) by name, stacked experts one by one."""
    model = trainer.get_model()
    if values is None:
        biases = ((n, value) for n, value in model.named_buffers() if n.endswith("load_bias"))
        values = (*model.named_parameters(), *biases)
    found = {}
    for name, value in values:
        value = None if value is None else value.detach().clone()
        if ".experts." not in name:
            found[name] = value
            continue
        for slot, expert in enumerate(model.moe_groups.local_experts):
            found[f"{name}[{expert}]"] = None if value is None else value[slot]
    return found


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gradients by name as :func:`named`; after train_step they are reduced, scaled and clipped."""
    model = trainer.get_model()
    return named(trainer, [(name, p.grad) for name, p in model.named_parameters()])


@dataclass
class Update:
    """What one update did: unrounded, summed over all ranks and micro-batches."""

    sums: dict[str, float]  # of the criterion's logging outputs
    sample_size: float
    grad_norm: float


def record_updates(trainer: Trainer) -> list[Update]:
    """A list to which every later train_step of the trainer appends, unless it was skipped."""
    updates: list[Update] = []
    original = trainer._reduce_and_log_stats

    def reduce_and_record(logging_outputs, sample_size, grad_norm=None):
        sums = {
            key: float(sum(log[key] for log in logging_outputs))
            for key, value in logging_outputs[0].items()
            if not isinstance(value, list) and not (torch.is_tensor(value) and value.dim())
        }
        if grad_norm is not None:
            updates.append(Update(sums, float(sample_size), float(grad_norm)))
        return original(logging_outputs, sample_size, grad_norm)

    trainer._reduce_and_log_stats = reduce_and_record
    return updates
