"""Save and restore a training run with experts on several ranks; :mod:`.sets` says when."""

import logging
import os
import sys
import time

from fairseq import checkpoint_utils, utils
from fairseq.logging import meters, metrics

from .... import training
from ....checkpoint import check_complete, split_key
from ....checkpoint.state import options_of
from ....distributed import process_world
from ..models.from_dense import copy_into_experts
from .sets import progress
from .update_size import other_update_size

logger = logging.getLogger(__name__)

# options that decide which parameters a model has, and their sizes
_OF_PARAMETERS = (
    *(f"{side}_{size}" for side in ("encoder", "decoder")
      for size in ("layers", "embed_dim", "ffn_embed_dim", "moe_freq")),
    *("moe_freq", "moe_expert_ffn_dim", "moe_shared_expert_ffn_dim", "moe_expert_network"),
    *("moe_shared_expert_gate", "moe_router", "moe_load_bias", "moe_null_experts", "moe_cmr"),
    *("moe_lora_rank", "moe_lora_alpha"),
)  # fmt: skip


class CheckpointMixin:
    """Checkpoint methods of :class:`~.trainer.MoETrainer`."""

    checkpoint_suffix = ""  # the index of a set has the name that fairseq looks for
    should_save_checkpoint_on_current_rank = True  # every rank holds experts

    def _state_names(self) -> training.StateNames:
        halves = getattr(self.optimizer, "fp16_params", ())
        copies = getattr(self.optimizer, "fp32_params", ())
        return training.StateNames(
            self.optimizer.params,
            {"": self._model, "criterion.": self._criterion},
            zip(halves, copies, strict=True),  # mixed precision: in the order of the originals
            otherwise="use --reset-optimizer",
        )

    def state_dict(self):
        """Return fairseq's state of this rank; the optimizer's is by parameter name. Collective."""
        self.consolidate_optimizer()  # prepares what the stock method reads
        state = super().state_dict()
        if state.get("last_optimizer_state") is not None:
            whole = training.whole_optimizer_state(
                self.optimizer.optimizer, state["last_optimizer_state"], "saving the optimizer"
            )
            state["last_optimizer_state"] = self._state_names().to_named(whole)
        return {**state, **self.growth.state()}

    def save_checkpoint(self, filename, extra_state):
        """Write a set under ``filename`` (X.pt). Collective."""
        if self._model.moe_groups.simulated:
            logger.warning("not saving %s: a simulated rank holds a part of the experts", filename)
            return None
        rank, world_size = process_world()
        # stock saves crash.pt after an exception; all ranks see only non-finite gradients at once
        alone = not isinstance(sys.exc_info()[1], (FloatingPointError, type(None)))
        if world_size > 1 and alone:
            logger.error("not saving %s: rank %d failed, others may not take part", filename, rank)
            return None
        path = os.path.abspath(filename)
        logger.info("Saving checkpoint set %s", path)
        state = self.state_dict()
        state["extra_state"] = {**state["extra_state"], **extra_state}
        training.save_state(path, state, self._model.moe_groups)
        self.exchange_log.save()
        return path

    def save_last(self, epoch_itr) -> str:
        """Write checkpoint_last.pt between two updates, whatever the options. Collective."""
        best = getattr(checkpoint_utils.save_checkpoint, "best", None)
        path = os.path.join(self.cfg.checkpoint.save_dir, "checkpoint_last.pt")
        self.save_checkpoint(path, progress(self, epoch_itr, None, best))
        return path

    def load_checkpoint(
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        optimizer_overrides=None,
        reset_meters=False,
    ):
        """Restore a set or merged file; return fairseq's extra state, None if there is none."""
        if self._model.moe_groups.simulated:
            logger.info("not looking for %s: a simulated rank starts afresh", filename)
            return None
        if not training.checkpoint_exists(filename):
            given = self.cfg.checkpoint.restore_file
            if given != "checkpoint_last.pt":
                raise FileNotFoundError(f"--restore-file {given}: {filename} does not exist")
            logger.info("No existing checkpoint found %s", filename)
            return None
        state = training.load_state(
            filename,
            self._model.moe_groups,
            with_optimizer=not reset_optimizer,
            otherwise="give --moe-expert-count {saved}",
            may_be_dense=hasattr(self._model, "moe_reports_are_collected"),
        )
        check_complete(state, filename)
        history = state["optimizer_history"]
        if not any(map(split_key, state["model"])):  # a dense model's
            copy_into_experts(self._model, state["model"], filename)
            state["last_optimizer_state"] = None  # of other parameters
            logger.info("every expert starts as the dense block of its layer in %s", filename)
        try:
            self._load_weights(state, filename)
        except ValueError as error:
            raise ValueError(f"{error}{self._other_options(state)}") from None
        optimizer_state = state.get("last_optimizer_state")
        if optimizer_state is not None and not reset_optimizer:
            self._load_optimizer(
                optimizer_state, history[-1], reset_lr_scheduler, optimizer_overrides
            )
            self._resume_logs(state["extra_state"])
        elif not reset_optimizer:
            logger.warning("%s holds no optimizer state: the optimizer starts afresh", filename)
        self.growth.resume(state)
        self._optim_history = history
        self._convert_position(state)
        extra_state = state["extra_state"]
        self._load_progress(extra_state, reset_meters)
        logger.info(
            "Loaded checkpoint %s (epoch %d @ %d updates)",
            *(filename, extra_state["train_iterator"]["epoch"], self.get_num_updates()),
        )
        return extra_state

    def _resume_logs(self, extra_state):
        update, rewrite = self.get_num_updates(), not self.cfg.checkpoint.no_save
        self.expert_load.resume(extra_state.get("moe_expert_load"), update, rewrite=rewrite)
        self.exchange_log.resume(extra_state.get("moe_tuner"), update, rewrite=rewrite)
        if self.trace is not None:
            self.trace.resume(update, rewrite=rewrite)

    def _convert_position(self, state):
        """Count the position in the data in steps of this run; warn of another update size.

        A step of W ranks consumes W batches. What does not divide is seen again, not skipped.
        """
        _, world_size = process_world()
        saved_by = (state["moe_checkpoint"] or {}).get("world_size") or world_size
        if saved_by == world_size:
            return
        position = state["extra_state"]["train_iterator"]
        position["iterations_in_epoch"] = position["iterations_in_epoch"] * saved_by // world_size
        if line := other_update_size(state, self.cfg, saved_by, world_size):
            logger.warning(line)

    def _other_options(self, state) -> str:
        """Return the end of an error about weights: the set's options for other parameters."""
        stored, mine = options_of(state), self.cfg.model
        wanted = [
            f"--{name.replace('_', '-')}" + f" {stored[name]}" * (stored[name] is not True)
            for name in _OF_PARAMETERS
            if stored.get(name) is not None and stored[name] != getattr(mine, name, None)
        ]
        return f"; the checkpoint was made with {' '.join(wanted)}" if wanted else ""

    def _load_weights(self, state, path):
        stored, model = options_of(state), self.cfg.model
        factor = getattr(model, "moe_lora_alpha", None)
        has_updates = stored.get("moe_lora_rank") and getattr(model, "moe_lora_rank", 0)
        if has_updates and stored["moe_lora_alpha"] != factor:
            raise ValueError(f"--moe-lora-alpha {factor} would scale the updates in {path} anew")
        if "num_updates" in state["optimizer_history"][-1]:
            self.model.set_num_updates(state["optimizer_history"][-1]["num_updates"])
        # popped to free the memory before the optimizer's state is read
        training.load_weights(self.model, state.pop("model"), path, model_cfg=self.cfg.model)
        if utils.has_parameters(self.get_criterion()):
            training.load_weights(self.get_criterion(), state["criterion"], path)

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
                    f"({chosen_by}): use the same, or --reset-optimizer"
                )
        if not reset_lr_scheduler:
            self.lr_scheduler.load_state_dict(last["lr_scheduler_state"])
        names = self._state_names()
        whole = names.from_named(optimizer_state, self.optimizer.state_dict())
        own = training.own_optimizer_state(self.optimizer.optimizer, whole)
        self.optimizer.load_state_dict(own, overrides)
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
            # start times of a former process mean nothing
            for meter in metrics.get_meters("default"):
                if isinstance(meter, meters.TimeMeter):
                    meter.reset()
