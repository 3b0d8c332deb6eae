"""transformers' Trainer for models with MoE layers."""

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import Trainer, TrainerCallback

from ... import training
from ...moe.experts import LoRAExperts
from ...moe.model import moe_layers
from ...training.lora import inside_peft
from .forwards import Forwards, generate_together
from .layers import ChosenExperts
from .restore import check_restorable, original_state_dict

TESTED = ">=5.23,<6"  # versions of transformers
_FILE = "run.pt"  # weights and optimizer state of all ranks, in each checkpoint-N


class MoETrainer(Trainer):
    """transformers' Trainer for a model with MoE layers, on any number of ranks.

    Differences to Trainer: the load balancing losses are added to the loss in training;
    gradients are clipped by the norm over all ranks' experts; ``save_model`` writes the experts of
    all ranks; a checkpoint resumes on any number of ranks; load biases move after each step. Build
    the model after the ranks are connected (reading ``args.world_size`` connects them).
    For another trainer that derives from Trainer: ``class Mine(MoETrainer, SFTTrainer): pass``
    (TRL's SFT, DPO, KTO, GRPO, RLOO). Padding of ``attention_mask`` does not count. ``generate``
    waits for all ranks. Logs have ``moe_aux_loss`` and ``AuxLosses.utilisation()``.

    Args:
        *args, **kwargs: arguments of Trainer.
        aux_weight (float): factor of the sum of the layers' load balancing losses (default 0.01).
        skip_padding (bool): padding goes to no expert (default False: it is routed).
        blocks (dict): result of :func:`replace_moe` (default None). With it ``save_model`` writes
            the names of transformers, which ``from_pretrained`` loads.

    If the experts have LoRA, ``save_model`` also calls ``training.save_lora`` for the folder
    ``experts`` (FINETUNING.md).

    It refuses DeepSpeed, FSDP, ``nn.DataParallel``, ranks that are not connected, re-entrant
    activation checkpointing together with ``aux_weight``, ``load_best_model_at_end`` together with
    ``save_only_model``, layers that ``blocks`` cannot hold, adapters that would not be trained or
    saved (ValueError), and a transformers with other private methods (ImportError). It warns of
    layers without a balance loss, of a second balance loss (``output_router_logits=True``), and of
    padding that counts (encoders with decoders). TRL's balance loss is left out unless its
    arguments ask for it.
    """

    def __init__(
        self,
        *args: Any,
        aux_weight: float = 0.01,
        skip_padding: bool = False,
        blocks: Mapping[str, nn.Module] | None = None,
        **kwargs: Any,
    ):
        _check_version()
        super().__init__(*args, **kwargs)
        self.aux_weight, self.skip_padding, self.blocks = aux_weight, skip_padding, blocks
        self._warned: set[str] = set()
        layers = moe_layers(self.model)
        self._routing = [x for x in layers.values() if not isinstance(x, ChosenExperts)]
        self._check_arguments()
        self._leave_out_balance_loss_of_trl()
        self._warn_of_layers(layers)
        training.prepare_data_parallel(self.model)
        if self.accelerator.scaler is not None:  # one rank's overflow: all ranks skip the step
            self.accelerator.scaler = training.grad_scaler(self.args.device.type)
        self.add_callback(_Updates(self))
        self._passes: list[training.AuxLosses] | None = None
        self._last: training.AuxLosses | None = None
        self._aux_losses: list[torch.Tensor] = []  # since the last line of the log

    def _check_arguments(self) -> None:
        engine = {"DeepSpeed": self.is_deepspeed_enabled, "FSDP": self.is_fsdp_enabled}
        for name, used in engine.items():
            if used:
                raise ValueError(f"MoETrainer does not work with {name}: leave it out")
        if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > self.args.world_size:
            raise ValueError(
                f"TrainingArguments has connected {self.args.world_size} of the {ranks} ranks that "
                "torchrun started: give use_cpu=True where there is no GPU"
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process: start one process per GPU with torchrun"
            )
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ValueError(
                "load_best_model_at_end needs whole checkpoints: save_only_model=False"
            )
        if self.aux_weight and self._routing and self._reenters():
            raise ValueError(
                "re-entrant activation checkpointing loses the gradient of the load balancing "
                "losses: give use_reentrant=False, or aux_weight=0"
            )
        for name, layer in moe_layers(self.model).items():
            if isinstance(layer.experts, LoRAExperts):
                if self.blocks is not None:
                    raise ValueError(f"{name} has LoRA, which blocks= cannot hold: leave it out")
                if not any(param.requires_grad for param in layer.experts.updates.values()):
                    raise ValueError(
                        f"{name} has frozen LoRA, as get_peft_model leaves it: call "
                        "add_lora(model, freeze=False) after it"
                    )
            elif hasattr(layer.experts, "base_layer"):
                raise ValueError(
                    f"{name}.experts has adapters of peft, which checkpoints cannot hold: call "
                    "add_lora(model, freeze=False) in place of target_parameters"
                )
            elif _has_peft(self.model) and layer.config.moves_load_bias:
                raise ValueError(
                    f"{name} has load_bias={layer.config.load_bias!r}, which peft does not save: "
                    "give load_bias='none', or adapt the experts too (add_lora)"
                )
        if self.blocks is not None and not _has_peft(self.model):  # peft saves adapters alone
            check_restorable(self.model, self.blocks)

    def _reenters(self) -> bool:
        """Return whether activation checkpointing runs layers without gradients first."""
        given = dict(self.args.activation_checkpointing_kwargs or {})
        given = {k: v for k, v in given.items() if k not in ("every_n_layers", "offload")}
        asked = [given] if self.args.activation_checkpointing and given else []
        for module in self.model.modules():  # checkpointing that was switched on before
            if getattr(module, "gradient_checkpointing", False):
                function = getattr(module, "_gradient_checkpointing_func", None)
                asked.append(getattr(function, "keywords", {"use_reentrant": False}))
        return any(each.get("use_reentrant") is not False for each in asked)  # torch's default

    def _leave_out_balance_loss_of_trl(self) -> None:
        """Switch off the balance loss that TRL adds to a model of experts without being asked."""
        unasked = getattr(self.args, "router_aux_loss_coef", 0.0) is None
        if unasked and self.aux_weight and self._routing:
            self.aux_loss_enabled = False
            inside_peft(self.model).config.get_text_config().output_router_logits = False

    def _warn_of_layers(self, layers: Mapping[str, nn.Module]) -> None:
        silent = len(layers) - len(self._routing)
        if self.aux_weight and silent:
            warnings.warn(
                f"aux_weight={self.aux_weight} has no effect on {silent} of {len(layers)} MoE "
                "layers, whose blocks go on routing: balance them by the model's own loss, such "
                "as output_router_logits=True",
                stacklevel=3,
            )

    def _warn_of_batch(self, forwards: Forwards) -> None:
        """Warn once each of a second balance loss and of padding that counts."""
        texts = []
        if self.aux_weight and forwards.has_aux_loss:
            texts.append(
                "two balance losses are added, the model's (output_router_logits=True) and "
                f"aux_weight={self.aux_weight}: set one of them to zero"
            )
        balances = self.aux_weight or any(x.config.moves_load_bias for x in self._routing)
        if balances and forwards.counts_padding:
            texts.append(
                "attention_mask has padding, which the layers' balance losses and load biases "
                "count as tokens: pack the sequences, or sort them by length"
            )
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                warnings.warn(text, stacklevel=3)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss, in training with the load balancing losses."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        forwards = Forwards(model, self.skip_padding)
        with training.collect_aux(model, "by_token") as aux, forwards:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, *outputs = result if return_outputs else (result,)
        if self.state.global_step == 0 and self._routing:
            self._warn_of_batch(forwards)
        self._last = aux.detached()
        if self._passes is not None:
            self._passes.append(self._last)
        weight = self.aux_weight
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = by_model or self.compute_loss_func is not None
        if is_scaled:  # nobody divides the loss by the number of micro-batches, as in Trainer
            weight /= self.current_gradient_accumulation_steps
        if weight:  # else losses without gradient do no harm
            aux_loss = aux.loss
            self._aux_losses.append(aux_loss.detach())
            loss = loss + weight * aux_loss
        return (loss, *outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        """Log also the aux loss since the last line, and the load of the last pass in training."""
        if "loss" in logs and self._last is not None:
            if self._aux_losses:
                logs["moe_aux_loss"] = torch.stack(self._aux_losses).mean().item()
            logs |= self._last.utilisation()
            self._last, self._aux_losses = None, []
        super().log(logs, start_time)

    def _prepare_inputs(self, inputs):
        with generate_together(self.model):
            return super()._prepare_inputs(inputs)

    def prediction_step(self, *args, **kwargs):
        with generate_together(self.model):
            return super().prediction_step(*args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        """Write the model with the experts of all ranks. All ranks call it."""
        if self.blocks is None or _has_peft(self.model):  # peft takes its adapters alone
            state = training.full_state_dict(self.model)
        else:
            state = original_state_dict(self.model, self.blocks)
        self._save(output_dir, state)
        if any(isinstance(layer.experts, LoRAExperts) for layer in moe_layers(self.model).values()):
            training.save_lora(f"{output_dir or self.args.output_dir}/experts", self.model)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # Private methods of Trainer. `_check_version` compares their arguments.

    def _clip_grad_norm(self, model):
        return self._global_norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self._global_norm(model, float("inf")) if grad_norm is None else grad_norm

    def _global_norm(self, model, max_norm):
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        return training.clip_grad_norm_(model, max_norm)

    def _save_optimizer_and_scheduler(self, output_dir):
        extra = {"schedule": self.lr_scheduler.state_dict()}
        training.save_checkpoint(f"{output_dir}/{_FILE}", self.model, self.optimizer, extra)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Do nothing: the weights are loaded with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            extra = training.load_checkpoint(f"{checkpoint}/{_FILE}", self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(extra["schedule"])

    def _load_best_model(self):
        training.load_checkpoint(f"{self.state.best_model_checkpoint}/{_FILE}", self.model)


class _Updates(TrainerCallback):
    """Callback that moves load biases after each step, and begins updates of balance losses."""

    def __init__(self, trainer: MoETrainer):
        configs = [layer.config for layer in moe_layers(trainer.model).values()]
        self.trainer, self.moves = trainer, any(config.moves_load_bias for config in configs)
        self.sums = any(config.balance_scope == "update" for config in configs)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.sums:
            training.end_update(self.trainer.model)
        self.trainer._passes = [] if self.moves else None

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.moves and not self.trainer.accelerator.optimizer_step_was_skipped:
            training.update_load_bias(self.trainer.model, self.trainer._passes)
        self.trainer._passes = None


def _has_peft(model: nn.Module) -> bool:
    """Return whether ``save_pretrained`` writes the adapters of peft alone."""
    return bool(getattr(model, "peft_config", None))


def _check_version() -> None:
    """Warn about a version that was not tested; raise ImportError if its methods are others."""
    found = f"MoETrainer was tested with transformers {TESTED}, this is {transformers.__version__}"
    for name in _PRIVATE:
        methods = [getattr(each, name, None) for each in (Trainer, MoETrainer)]
        theirs, ours = (each and list(inspect.signature(each).parameters) for each in methods)
        if theirs != ours:
            raise ImportError(f"{found}: Trainer.{name} is another; install a tested version")
    if not SpecifierSet(TESTED).contains(transformers.__version__, prereleases=True):
        warnings.warn(found, stacklevel=3)


_PRIVATE = (
    "_clip_grad_norm", "_get_grad_norm", "_load_best_model", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_prepare_inputs", "_save_optimizer_and_scheduler",
)  # fmt: skip
