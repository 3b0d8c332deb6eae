"""``--moe-grow-at``: a run gets more experts, and keeps the history of its set.

After the update the run saves its last checkpoint. Rank 0 replaces it by the grown set in one step.
All ranks begin again (requeue.py), and :func:`follow_set` has the model built for the set that is
found. A run that was killed before grows at once.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import open_dict

from ....checkpoint import read_set, set_exists
from ....checkpoint.growth import grow
from ....checkpoint.state import GROWTH
from ....command_line import GOES_ON
from ....config import GrowAt, exchange_size
from ....distributed import possible_r, slice_size
from ....moe.memory import StepMemory
from ....training import all_ranks
from ..programs import program

logger = logging.getLogger(__name__)
# options of the start, for a run that goes on
_FROM_LAST = {
    "restore_file": "checkpoint_last.pt",
    "finetune_from_model": None,
    **dict.fromkeys(("reset_dataloader", "reset_lr_scheduler", "reset_meters"), False),
    "reset_optimizer": False,
}


class RunGrowth:
    """Growth of one run; ValueError if it cannot grow as the options say."""

    def __init__(self, cfg: Any, model: torch.nn.Module):
        self.grow_at = GrowAt.of(getattr(cfg.model, "moe_grow_at", None))
        self.history: list[dict[str, Any]] = []  # of the set that the run started from
        self._model, self._memory_checked = model, False
        if self.grow_at is not None:
            _check(cfg, model, self.grow_at)

    def is_due(self, update: int) -> bool:
        """Return whether the run grows now, after this update."""
        if self.grow_at is None or update < self.grow_at.update:
            return False
        return self._model.moe_groups.num_experts < self.grow_at.num_experts

    def check_memory(self, memory_of_step: Callable[[int], StepMemory | None]) -> None:
        """Raise ValueError before the first update if the grown model needs too much memory."""
        if self._memory_checked or self.grow_at is None:
            return
        self._memory_checked = True
        need = memory_of_step(self.grow_at.num_experts)
        if need is None:
            logger.warning("--moe-grow-at %s: its memory was not checked", self.grow_at)
        elif not need.fits:
            raise ValueError(f"--moe-grow-at {self.grow_at}: {need}; more ranks, or fewer experts")

    def grow(self, path: str) -> None:
        """Write the grown set in place of the saved one. Collective."""
        wanted = self.grow_at.num_experts
        logger.info("--moe-grow-at %s: growing %s to %d experts", self.grow_at, path, wanted)
        all_ranks().run_on_first(f"growing {path}", lambda: grow(path, path, wanted, in_place=True))

    def state(self) -> dict[str, Any]:
        """Return entries for a checkpoint."""
        return {GROWTH: self.history} if self.history else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take a checkpoint's history, which the run's own checkpoints repeat."""
        self.history = state.get(GROWTH) or []


def follow_set(cfg: Any) -> None:
    """Let a run with ``--moe-grow-at`` build its model for the set that it goes on from."""
    grow_at = GrowAt.of(getattr(cfg.model, "moe_grow_at", None))
    if grow_at is None:
        return
    if os.environ.get(GOES_ON):
        with open_dict(cfg):
            cfg.checkpoint.update(_FROM_LAST)
    path = cfg.checkpoint.restore_file
    if path == "checkpoint_last.pt":
        path = os.path.join(cfg.checkpoint.save_dir, path)
    if not set_exists(path):
        return
    held, given = read_set(path).num_experts, cfg.model.moe_expert_count
    if held != grow_at.num_experts or given == held:
        return
    with open_dict(cfg):
        cfg.model.moe_expert_count = held
    if cfg.distributed_training.distributed_rank == 0:
        logger.info(
            "%s has %d experts (--moe-grow-at %s): going on with them, not with %s",
            *(path, held, grow_at, f"--moe-expert-count {given}" if given else "one per rank"),
        )


def _check(cfg: Any, model: torch.nn.Module, grow_at: GrowAt) -> None:
    """Raise ValueError if the run cannot grow as the options say."""
    flag, groups = f"--moe-grow-at {grow_at}", model.moe_groups
    if cfg.checkpoint.no_save or groups.simulated:
        raise ValueError(f"{flag} goes on from a checkpoint, but this run saves none")
    if cfg.model.moe_tune_file is not None:
        raise ValueError(f"{flag} changes the sizes that --moe-tune-file is for: leave out one")
    started, method = cfg.distributed_training, cfg.distributed_training.distributed_init_method
    alone = started.distributed_world_size == 1
    # Hydra builds the model with the experts of its config, whatever the set has by now
    if program() == "fairseq-hydra-train" or not alone and method != "env://":
        raise ValueError(
            f"{flag} needs fairseq-train, and ranks of python -m fairseq_tutel.launch or torchrun; "
            "or stop the run and use python -m fairseq_tutel.checkpoint grow"
        )
    if grow_at.num_experts < groups.num_experts:
        raise ValueError(f"{flag} must make more experts, but there are {groups.num_experts}")
    try:
        _check_placement(cfg, model, grow_at.num_experts)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _check_placement(cfg: Any, model: torch.nn.Module, num_experts: int) -> None:
    """Raise ValueError if that many experts cannot be placed as the options say."""
    groups = model.moe_groups
    size = exchange_size(num_experts, groups.world_size, cfg.model.moe_expert_parallel_size)
    replicas = groups.world_size // size
    grown = replace(groups, num_experts=num_experts, ep_size=size, num_replicas=replicas)
    r, possible = str(cfg.model.moe_parallelism_r), possible_r(grown)
    if r != "auto" and int(r) not in possible:
        raise ValueError(
            f"--moe-parallelism-r {r} does not fit {num_experts} experts on {groups.world_size} "
            f"ranks: choose one of {', '.join(map(str, possible))}"
        )
    for layer in model.moe_layers.values():
        slice_size(getattr(layer.experts, "hidden_dim", grown.num_slices), grown.num_slices)
