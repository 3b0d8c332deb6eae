"""Saving and restoring a training run with experts on several ranks.

A checkpoint is a set of files in the layout of fairseq's ``moe`` branch, written as one thing
(:mod:`fairseq_tutel.checkpoint`). When it is saved, under which names and how many are kept follow
fairseq's options as documented there; the stock function copies and removes single files.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import numpy as np
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from fairseq.logging import meters, metrics

from ...checkpoint import (
    check_complete,
    copy_set,
    final_path,
    find_sets,
    recover_directory,
    remove_set,
)
from ...distributed import gather_texts, process_world
from .. import (
    StateNames,
    check_num_experts,
    checkpoint_exists,
    fitting,
    load_state,
    save_state,
)

logger = logging.getLogger(__name__)

_SUFFIX = "-shared"


class CheckpointMixin:
    """The part of :class:`~fairseq_tutel.hosts.fairseq.trainer.MoETrainer` that handles files."""

    @property
    def checkpoint_suffix(self) -> str:
        """The file that stands for a set wherever fairseq looks for one file."""
        return _SUFFIX

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """Every rank holds experts."""
        return True

    def _state_names(self) -> StateNames:
        halves = getattr(self.optimizer, "fp16_params", ())
        copies = getattr(self.optimizer, "fp32_params", ())
        return StateNames(
            self.optimizer.params,
            {"": self._model, "criterion.": self._criterion},
            zip(halves, copies, strict=True),  # mixed precision: in the order of their originals
            otherwise="use --reset-optimizer",
        )

    def state_dict(self):
        """fairseq's state of this rank, the optimizer's by parameter name."""
        self.consolidate_optimizer()  # prepares what the stock method reads
        state = super().state_dict()
        if state.get("last_optimizer_state") is not None:
            names = self._state_names()
            state["last_optimizer_state"] = names.to_named(state["last_optimizer_state"])
        return state

    def save_checkpoint(self, filename, extra_state):
        """Write a set under ``filename`` (X.pt). Collective, except for crash.pt: see below.

        fairseq's trainer saves crash.pt where an exception goes by. Non-finite gradients are seen
        by all ranks at once; any other exception is this rank's alone, and the others would not
        take part.
        """
        if self._model.moe_groups.simulated:
            logger.warning("not saving %s: a simulated rank holds a part of the experts", filename)
            return None
        rank, world_size = process_world()
        alone = not isinstance(sys.exc_info()[1], (FloatingPointError, type(None)))
        if world_size > 1 and alone:
            logger.error("not saving %s: rank %d failed, others may not take part", filename, rank)
            return None
        path = filename.replace(f"{_SUFFIX}.pt", ".pt")
        logger.info("Saving checkpoint set %s", os.path.abspath(path))
        state = self.state_dict()
        state["extra_state"] = {**state["extra_state"], **extra_state}
        save_state(path, state, self._model.moe_groups)
        self.exchange_log.save()
        return os.path.abspath(path)

    def save_last(self, epoch_itr) -> str:
        """Write checkpoint_last.pt between two updates, whatever the options. Collective."""
        best = getattr(checkpoint_utils.save_checkpoint, "best", None)
        path = os.path.join(self.cfg.checkpoint.save_dir, "checkpoint_last.pt")
        self.save_checkpoint(path, _progress(self, epoch_itr, None, best))
        return path

    def load_checkpoint(
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        optimizer_overrides=None,
        reset_meters=False,
    ):
        """Restore from a set (or merged file) saved by any number of ranks.

        Returns:
            fairseq's extra state, None if there is nothing to restore, and in a simulation.

        Raises:
            FileNotFoundError: the checkpoint that the user named does not exist.
            ValueError: it does not fit this run, or some ranks do not see it.
        """
        path = final_path(filename).replace(f"{_SUFFIX}.pt", ".pt")
        if self._model.moe_groups.simulated:
            logger.info("not looking for %s: a simulated rank starts afresh", path)
            return None
        rank, world_size = process_world()
        world = {"rank": rank, "world_size": world_size, "gather_texts": gather_texts}
        if not self.cfg.checkpoint.no_save:  # it may be another run's folder
            recover_directory(self.cfg.checkpoint.save_dir, **world)
        if not checkpoint_exists(path):
            if self.cfg.checkpoint.restore_file != "checkpoint_last.pt":
                raise FileNotFoundError(
                    f"--restore-file {self.cfg.checkpoint.restore_file}: neither {path} nor "
                    f"{filename} exists"
                )
            logger.info("No existing checkpoint found %s", path)
            return None
        state = load_state(path, self._model.moe_groups, with_optimizer=not reset_optimizer)
        check_complete(state, path)
        history = state["optimizer_history"]
        self._load_weights(state, path)
        optimizer_state = state.get("last_optimizer_state")
        if optimizer_state is not None and not reset_optimizer:
            self._load_optimizer(
                optimizer_state, history[-1], reset_lr_scheduler, optimizer_overrides
            )
            load = state["extra_state"].get("moe_expert_load")
            rewrite = not self.cfg.checkpoint.no_save
            self.expert_load.resume(load, self.get_num_updates(), rewrite=rewrite)
            tuner = state["extra_state"].get("moe_tuner")
            self.exchange_log.resume(tuner, self.get_num_updates(), rewrite=rewrite)
        elif not reset_optimizer:
            logger.warning("%s holds no optimizer state: the optimizer starts afresh", path)
        self._optim_history = history
        extra_state = state["extra_state"]
        _rescale_position(extra_state["train_iterator"], state["moe_checkpoint"], world_size)
        self._load_progress(extra_state, reset_meters)
        epoch = extra_state["train_iterator"]["epoch"]
        logger.info(
            "Loaded checkpoint %s (epoch %d @ %d updates)", path, epoch, self.get_num_updates()
        )
        return extra_state

    def _load_weights(self, state, path):
        otherwise = "give --moe-expert-count {}"
        check_num_experts(state, self._model.moe_groups, path, otherwise)
        if state["optimizer_history"] and "num_updates" in state["optimizer_history"][-1]:
            self.model.set_num_updates(state["optimizer_history"][-1]["num_updates"])
        with fitting(path):
            self.model.load_state_dict(state["model"], strict=True, model_cfg=self.cfg.model)
            if utils.has_parameters(self.get_criterion()):
                self.get_criterion().load_state_dict(state["criterion"], strict=True)
        del state["model"]  # free the memory before the optimizer's state is read

    def _load_optimizer(self, optimizer_state, last, reset_lr_scheduler, overrides):
        self._build_optimizer()  # anew: it may have copied the parameters
        criterion, optimizer = type(self.get_criterion()).__name__, type(self.optimizer).__name__
        precisions = "--optimizer, --fp16, --bf16, --memory-efficient-fp16 or -bf16 choose it"
        for what, stored, mine, chosen_by in (
            ("criterion", last["criterion_name"], criterion, "--criterion chooses it"),
            ("optimizer", last["optimizer_name"], optimizer, precisions),
        ):
            if stored != mine:
                raise ValueError(
                    f"the checkpoint was trained with {what} {stored}, this run uses {mine} "
                    f"({chosen_by}): go on with that one, or use --reset-optimizer"
                )
        if not reset_lr_scheduler:
            self.lr_scheduler.load_state_dict(last["lr_scheduler_state"])
        names = self._state_names()
        self.optimizer.load_state_dict(
            names.from_named(optimizer_state, self.optimizer.state_dict()), overrides
        )
        names.restore_masters(optimizer_state)
        self.set_num_updates(last["num_updates"])

    def _load_progress(self, extra_state, reset_meters):
        position = extra_state["train_iterator"]
        if "previous_training_time" in extra_state:
            self._previous_training_time = extra_state["previous_training_time"]
            self._start_time = time.time()
        self.lr_step(position["epoch"])
        if position.get("version", 1) >= 2 and position["iterations_in_epoch"] == 0:
            reset_meters = True  # a new epoch begins
        if "metrics" in extra_state and not reset_meters:
            metrics.load_state_dict(extra_state["metrics"])
            # the start times of a former process mean nothing
            for meter in metrics.get_meters("default"):
                if isinstance(meter, meters.TimeMeter):
                    meter.reset()


def _rescale_position(position, metadata, world_size) -> None:
    """Count the batches consumed in an epoch in steps of this run's ranks, in place.

    One step of W ranks consumes W batches of a fixed order. Where the numbers do not divide, the
    rest is seen again rather than skipped.
    """
    saved_by = (metadata or {}).get("world_size") or world_size
    if saved_by != world_size:
        position["iterations_in_epoch"] = position["iterations_in_epoch"] * saved_by // world_size


def save_set(cfg, trainer, epoch_itr, val_loss, best_so_far):
    """fairseq's ``checkpoint_utils.save_checkpoint`` for sets; every rank calls it.

    Args:
        cfg: fairseq's ``checkpoint`` config.
        val_loss: validation metric of this save, None if there was no validation.
        best_so_far: best metric including ``val_loss``, None if there is none.

    Returns:
        Path of the first set that was written, None if none was due.
    """
    rank, world_size = process_world()
    world = {"rank": rank, "world_size": world_size, "gather_texts": gather_texts}
    begin = time.perf_counter()
    names = json.loads(
        gather_texts(json.dumps(_due_names(cfg, trainer, epoch_itr, val_loss, best_so_far)))[0]
    )
    if not names:
        return None
    extra_state = _progress(trainer, epoch_itr, val_loss, best_so_far)
    first, *others = (os.path.join(cfg.save_dir, name) for name in names)
    trainer.save_checkpoint(first, extra_state)
    for path in others:
        copy_set(first, path, **world)
    logger.info(
        "Saved checkpoint %s (epoch %d @ %d updates, score %s) (writing took %.1f seconds)",
        first,
        epoch_itr.epoch,
        trainer.get_num_updates(),
        val_loss,
        time.perf_counter() - begin,
    )
    for path in json.loads(gather_texts(json.dumps(_superfluous(cfg, epoch_itr)))[0]):
        remove_set(path, **world)
    return first


def _progress(trainer, epoch_itr, val_loss, best_so_far) -> dict:
    """Where the run is: fairseq's extra state."""
    extra_state = {"train_iterator": epoch_itr.state_dict(), "val_loss": val_loss}
    if hasattr(trainer.task, "get_checkpoint_dict"):
        extra_state.update(trainer.task.get_checkpoint_dict())
    if best_so_far is not None:
        extra_state["best"] = best_so_far
    if trainer.expert_load.state() is not None:
        extra_state["moe_expert_load"] = trainer.expert_load.state()
    if trainer.exchange_log.state() is not None:
        extra_state["moe_tuner"] = trainer.exchange_log.state()
    return extra_state


def _due_names(cfg, trainer, epoch_itr, val_loss, best_so_far) -> list[str]:
    """Names of the sets that fairseq's options ask for now; all are copies of one."""
    epoch, updates = epoch_itr.epoch, trainer.get_num_updates()
    end_of_epoch = epoch_itr.end_of_epoch()
    names = []
    if end_of_epoch and not cfg.no_epoch_checkpoints and epoch % cfg.save_interval == 0:
        names.append(f"checkpoint{epoch}.pt")
    every = cfg.save_interval_updates
    if not end_of_epoch and every > 0 and updates % every == 0:
        names.append(f"checkpoint_{epoch}_{updates}.pt")
    if val_loss is not None:
        if val_loss == best_so_far:
            names.append("checkpoint_best.pt")
        if cfg.keep_best_checkpoints > 0 and _among_best(cfg, val_loss):
            with data_utils.numpy_seed(epoch, updates, val_loss):
                tie_breaker = np.random.randint(0, cfg.keep_best_checkpoints)
            names.append(
                f"checkpoint.best_{cfg.best_checkpoint_metric}_{val_loss:.3f}{tie_breaker}.pt"
            )
    if not cfg.no_last_checkpoints:
        names.append("checkpoint_last.pt")
    return names


def _best_pattern(cfg) -> str:
    return rf"checkpoint\.best_{cfg.best_checkpoint_metric}_(-?\d+\.?\d*)\.pt"


def _among_best(cfg, val_loss) -> bool:
    kept = [value for _, value in find_sets(cfg.save_dir, _best_pattern(cfg), keep_match=True)]
    if len(kept) < cfg.keep_best_checkpoints:
        return True
    if cfg.maximize_best_checkpoint_metric:
        return val_loss >= min(kept)
    return val_loss <= max(kept)


def _superfluous(cfg, epoch_itr) -> list[str]:
    """Sets that the ``--keep-*`` options no longer want."""
    old: list[str] = []
    if not epoch_itr.end_of_epoch() and cfg.keep_interval_updates > 0:
        saved = find_sets(cfg.save_dir, r"checkpoint_\d+_(\d+)\.pt", keep_match=True)
        step = cfg.keep_interval_updates_pattern
        paths = [path for path, update in saved if step == -1 or update % step != 0]
        old += paths[cfg.keep_interval_updates :]
    if cfg.keep_last_epochs > 0:
        old += find_sets(cfg.save_dir, r"checkpoint(\d+)\.pt")[cfg.keep_last_epochs :]
    if cfg.keep_best_checkpoints > 0:
        saved = find_sets(cfg.save_dir, _best_pattern(cfg))
        if not cfg.maximize_best_checkpoint_metric:
            saved = saved[::-1]
        old += saved[cfg.keep_best_checkpoints :]
    return old
