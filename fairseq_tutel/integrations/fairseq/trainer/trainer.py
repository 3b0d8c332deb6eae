"""fairseq's Trainer for a model with experts: it overrides what stock gets wrong for experts."""

import contextlib
import logging

from fairseq import utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import open_dict

from ....config import GATE_LOSS_WEIGHTS, PRESETS
from ....config.options import as_flag, check_needs
from ....distributed import copies_of, gather_objects, is_expert, process_world
from ....moe.model import moe_layers
from ....training import expert_grad_sq_norm
from ..criterions import CRITERIONS, GateLoss, MoECriterion
from ..criterions.moe_criterion import join_passes, log_moe_metrics, logged_passes
from ..models import AnyMoEOptions, adopt_inner
from ..options.held_experts import refuse_in_training
from ..options.options import MoEOptions
from ..programs import blocks
from ..programs.ranks import refuse_separate_ranks
from ..programs.trace import trace_model
from . import parallel
from .checkpointing import CheckpointMixin
from .growth import RunGrowth
from .memory import MemoryMixin
from .requeue import RequeueRequest, begin_again, leave
from .run_logs import ExchangeLog, ExpertLoadLog
from .sets import changed

logger = logging.getLogger(__name__)
# what decodes in validation, or in training: the number of passes depends on a rank's sentences
_DECODING_OPTIONS = ("eval_bleu", "eval_wer", "eval_inference")
_DECODING_TASKS = ("online_backtranslation", "semisupervised_translation")
# options that the trainer reads
_READ = ("moe_normalize_expert_grad", "moe_load_log_interval", "num_workers_valid")


class _OverflowOnCpu(RuntimeError):
    """Carrier of fairseq's OverflowError past a handler in train_step that needs CUDA."""


def has_experts(model) -> bool:
    """Return whether a fairseq model, or a part of it, says that it has MoE layers."""
    adopt_inner(model)
    return bool(getattr(model, "moe_layers", None))


def refuse_unsaid_experts(model) -> None:
    """Raise ValueError for MoE layers that the model does not say, if stock would train it wrong.

    Stock averages the experts of different ranks, and moves no load bias.
    """
    layers = {} if has_experts(model) else moe_layers(model)
    biased = any(layer.config.moves_load_bias for layer in layers.values())
    if layers and (biased or process_world()[1] > 1):
        raise ValueError(
            f"{type(model).__name__} has MoE layers ({', '.join(layers)}): with a load bias or "
            "several ranks its class needs the properties moe_layers and moe_groups "
            "(CONTRIBUTING.md)"
        )


class MoETrainer(CheckpointMixin, MemoryMixin, Trainer):
    """Trainer for models with experts; :mod:`..hooks` puts it in place of fairseq's."""

    def __init__(self, cfg, task, model, criterion, quantizer=None):
        refuse_in_training(cfg.model)
        check_needs(cfg.model, MoEOptions, as_flag)  # Hydra has no rules of the command line
        _prepare_config(cfg, model)
        _refuse_decoding(cfg, model)
        super().__init__(cfg, task, model, criterion, quantizer)
        self._gate_loss = _gate_loss(cfg.model, model, criterion)
        logger.info(_use_preset(cfg, model, self._gate_loss or criterion))
        self._routing_logs = []  # of all ranks, if a GateLoss makes them
        self._moves_load_bias = _moves_load_bias(model, criterion)
        logger.info(_parameters(model))
        folder, writes = cfg.checkpoint.save_dir, self.is_data_parallel_master
        interval = cfg.model.moe_load_log_interval
        self.expert_load = ExpertLoadLog(folder, list(model.moe_layers), interval, writes)
        tuner = getattr(model, "exchange_tuner", None)  # a user's model may have none
        self.exchange_log = ExchangeLog(tuner, folder, writes)
        self.trace = trace_model(model, task, cfg.model)
        self.requeue = RequeueRequest()
        self.growth = RunGrowth(cfg, model)
        self._epoch_itr = None
        self._num_fillers = 0

    @property
    def model(self):
        """The model, wrapped for data parallelism if there are several ranks."""
        if not self.use_distributed_wrapper:
            return self._model
        if self._wrapped_model is None:
            dist_cfg, group = self.cfg.distributed_training, self.data_parallel_process_group
            normalize = str(self.cfg.model.moe_normalize_expert_grad)
            self._wrapped_model = parallel.MoEDistributedModel(
                dist_cfg, self._model, group, self.device, normalize
            )
        return self._wrapped_model

    def _build_optimizer(self):
        if self.cfg.optimizer is None:
            raise ValueError("no optimizer is chosen: give --optimizer adam, or another")
        dist_cfg, name = self.cfg.distributed_training, self.cfg.optimizer._name
        with changed(dist_cfg, {"zero_sharding": "none"}):  # stock's is fairscale's
            super()._build_optimizer()
        parallel.fit_to_slices(self._optimizer, name, self._model.moe_groups)
        if not parallel.trains_dense([*self._model.parameters(), *self._criterion.parameters()]):
            parallel.clip_experts_alone(self._optimizer)
        if dist_cfg.zero_sharding == "os":
            parallel.shard_states(self._optimizer, name)

    def clip_grad_norm(self, clip_norm):
        """Clip by the norm over dense gradients and all ranks' experts, which stock leaves out."""

        def add_experts(dense_norm):
            experts = expert_grad_sq_norm(self.optimizer.params, self._model.moe_groups)
            return (dense_norm.float().square() + experts.to(dense_norm.device)).sqrt()

        try:
            return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=add_experts)
        except OverflowError as error:
            if self.cuda:
                raise
            raise _OverflowOnCpu(str(error)) from error

    def begin_epoch(self, epoch):
        """Begin an epoch, or leave if that was asked for in the last update of the epoch before."""
        super().begin_epoch(epoch)
        self.growth.check_memory(self.memory_of_step)
        # growth is also due for a run that was killed before it had grown
        if self.requeue.at_next_epoch or self.growth.is_due(self.get_num_updates()):
            self.leave()

    def train_step(self, samples, raise_oom=False):
        """Make one update, or skip it if the loss scale overflows."""
        log_output = self._train_step(samples, raise_oom)
        # for programs without a hook after updates, such as other training loops
        if not self.requeue.watched and self.must_leave:
            self.leave()
        return log_output

    @property
    def must_leave(self) -> bool:
        """Whether the run ends after this update, to be started again; the same on all ranks."""
        return self.requeue.made_on_any_rank() or self.growth.is_due(self.get_num_updates())

    def leave(self):
        """Save the last checkpoint and end the process, or begin again with more experts."""
        path = self.save_last(self._epoch_itr)
        if self.growth.is_due(self.get_num_updates()):
            self.growth.grow(path)
            if not self.requeue.made_meanwhile():  # while the set was written
                begin_again(path)
        leave(path)

    def _train_step(self, samples, raise_oom):
        # At the end of an epoch, empty batches fill up a rank's share of an update; each costs a
        # forward pass on a dummy. Stock counts the rank's real batches only if the last one is
        # real, and then counts the dummies too. Here the dummies go first and do not count.
        fillers = [sample for sample in samples if not sample]
        real = [sample for sample in samples if sample]
        self._num_fillers = len(fillers) if real else 0
        samples = [*fillers, *real]
        for layer in self._model.moe_layers.values():
            layer.update_load.reset()
        if self._gate_loss is not None:
            self._gate_loss.take()  # of an update that overflowed, whose logs nobody read
        if self.trace is not None:
            self.trace.before(self.get_num_updates() + 1)
        try:
            with self._explaining_memory():
                return super().train_step(samples, raise_oom or self._others_wait)
        except _OverflowOnCpu as error:
            # as the stock handler, which would make a CUDA tensor
            logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", error)
            self.zero_grad()
            metrics.log_scalar(
                "loss_scale", self.optimizer.scaler.loss_scale, priority=700, round=4, weight=0
            )
            metrics.log_stop_time("train_wall")
            return None

    def valid_step(self, sample, raise_oom=False):
        """Validate one batch."""
        if self.trace is not None:
            self.trace.before(self.get_num_updates())
        return super().valid_step(sample, raise_oom or self._others_wait)

    @property
    def _others_wait(self) -> bool:
        """Whether a rank must not skip a batch if memory runs out: the others would hang."""
        return self.data_parallel_world_size > 1

    def get_train_iterator(self, *args, **kwargs):
        """Return stock's iterator, and keep it: checkpoints need its position in the data."""
        self._epoch_itr = super().get_train_iterator(*args, **kwargs)
        return self._epoch_itr

    def get_valid_iterator(self, subset, disable_iterator_cache=False):
        """Return an iterator over the whole subset, with ``--num-workers-valid`` processes."""
        dataset = self.cfg.dataset
        skips = dataset.skip_invalid_size_inputs_valid_test
        refusing = contextlib.nullcontext() if skips else blocks.refusing_long_blocks(self.task)
        for_validation = {
            "num_workers": self.cfg.model.num_workers_valid,
            "required_batch_size_multiple": 1,  # stock drops a last batch of another size
        }
        with refusing, changed(dataset, for_validation):
            return super().get_valid_iterator(subset, disable_iterator_cache)

    def _prepare_sample(self, sample, is_dummy=False):
        sample, is_dummy_batch = super()._prepare_sample(sample, is_dummy)
        if self._gate_loss is not None:
            self._gate_loss.ignored = is_dummy or is_dummy_batch
        if self.trace is not None:
            self.trace.ignores = is_dummy or is_dummy_batch
        return sample, is_dummy_batch

    def _all_gather_list_sync(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        """Gather what stock's function gathers, on CPUs too and of any size."""
        mine = [[] if ignore else logging_outputs, extra_stats_to_sum]
        logs, stats = zip(*gather_objects(utils.move_to_cpu(mine)), strict=True)
        return [log for each in logs for log in each], [sum(s) for s in zip(*stats, strict=True)]

    def _aggregate_logging_outputs(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        if self._gate_loss is not None:
            mine = self._gate_loss.take()
            join_passes(mine)
            self._routing_logs, _ = self._fast_stat_sync_sum(mine)
        fillers, self._num_fillers = self._num_fillers, 0
        if fillers:
            sample_size, *others = extra_stats_to_sum
            sample_size -= sum(log["sample_size"] for log in logging_outputs[:fillers])
            extra_stats_to_sum = (sample_size, *others)
        logging_outputs = logging_outputs[fillers:]
        join_passes(logging_outputs, fillers)
        # all ranks decide whether to leave, in the reduction that is needed anyway
        logging_outputs, (*sums, self.requeue.num_votes) = super()._aggregate_logging_outputs(
            logging_outputs, *extra_stats_to_sum, self.requeue.vote, ignore=ignore
        )
        return logging_outputs, tuple(sums)

    def _reduce_and_log_stats(self, logging_outputs, sample_size, grad_norm=None):
        logs = logging_outputs or ()
        if self._gate_loss is not None:
            logs, self._routing_logs = self._gate_loss.take() or self._routing_logs, []
            log_moe_metrics(logs, with_loss=False)
        if grad_norm is not None:  # the update was made, not skipped
            update, passes = self.get_num_updates(), logged_passes(logs)
            if passes is not None:
                self.expert_load.add(update, passes)
                if self._moves_load_bias:
                    self._move_load_biases(logs)
            self.exchange_log.after(update)
        return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)

    def _move_load_biases(self, logging_outputs):
        if any("moe_bias_counts" not in log for log in logging_outputs):
            raise ValueError(
                "--moe-load-bias needs a router that reports bias_counts, as route_logits() does; "
                f"{self.cfg.model.moe_router!r} does not"
            )
        counts = sum(log["moe_bias_counts"] for log in logging_outputs)
        for layer, layer_counts in zip(self._model.moe_layers.values(), counts, strict=True):
            layer.gate.update_load_bias(layer_counts)


def _prepare_config(cfg, model) -> None:
    """Store what follows from the whole config; ValueError if it cannot train experts."""
    dist_cfg, common = cfg.distributed_training, cfg.common
    if dist_cfg.ddp_backend not in (*parallel.LEGACY_BACKENDS, *parallel.PYTORCH_BACKENDS):
        given = f"--ddp-backend {dist_cfg.ddp_backend}"
        raise ValueError(f"{given} cannot train experts: use legacy_ddp or pytorch_ddp")
    refuse_separate_ranks()
    if common.fp16 and common.bf16:
        raise ValueError("common.fp16 and common.bf16 exclude each other: give one")
    for flag, on in (
        ("--amp", common.amp),
        ("--tpu", common.tpu),
        ("--use-bmuf", cfg.optimization.use_bmuf),
        ("--store-ema", cfg.ema.store_ema),
        ("--pipeline-model-parallel", dist_cfg.pipeline_model_parallel),
        ("--model-parallel-size", common.model_parallel_size > 1),
    ):
        if on:
            raise ValueError(f"{flag} is not supported with MoE layers")
    mixed_fp16 = common.fp16 and not common.memory_efficient_fp16
    with open_dict(cfg):
        if mixed_fp16 and not common.fp16_no_flatten_grads:
            # a flattened gradient mixes experts and dense parameters
            logger.info("--fp16 with MoE layers: gradients are not flattened")
            common.fp16_no_flatten_grads = True
        if model.moe_groups.simulated:
            cfg.checkpoint.no_save = True  # the weights of one rank out of many are no checkpoint
        # a checkpoint must state its number of experts, even if it is the default
        cfg.model.moe_expert_count = model.moe_groups.num_experts
        for name in _READ:  # absent if only a part of the model has options of experts
            if not hasattr(cfg.model, name):
                setattr(cfg.model, name, _default(name))


def _gate_loss(options, model, criterion) -> GateLoss | None:
    """Let any criterion add the gate loss of a model that does not report by itself."""
    if isinstance(criterion, MoECriterion) or not hasattr(model, "moe_reports_are_collected"):
        return None
    name = "moe_gate_loss_combine_method"
    return GateLoss(model, criterion, getattr(options, name, _default(name)))


def _use_preset(cfg, model, criterion) -> str:
    """Give the criterion, or a GateLoss, its weight; return a line about the preset.

    The config then says what options the run has, whatever the preset is in other versions.
    """
    preset = str(getattr(cfg.model, "moe_preset", None) or "meta")
    routing = next(iter(model.moe_layers.values())).config
    used = {f"moe_{name}": getattr(routing, name) for name in PRESETS["meta"]}
    for name, value in used.items():
        if hasattr(cfg.model, name):
            setattr(cfg.model, name, value)
    if isinstance(criterion, MoECriterion | GateLoss):
        section = cfg.model if isinstance(criterion, GateLoss) else cfg.criterion
        weight = getattr(section, "moe_gate_loss_wt", None)
        if weight is None:
            weight = GATE_LOSS_WEIGHTS.get(preset, criterion.default_weight)
        criterion.gate_loss_weight = used["moe_gate_loss_wt"] = weight
        with open_dict(cfg):  # only a part of the model may have options of experts
            section.moe_gate_loss_wt = weight
    return f"--moe-preset {preset}: {' '.join(as_flag(*each) for each in used.items())}"


def _default(name: str):
    return AnyMoEOptions.__dataclass_fields__[name].default


def _refuse_decoding(cfg, model) -> None:
    """Raise ValueError if a rank would decode alone, and needs other ranks' experts for it."""
    if not model.moe_groups.needs_sync:
        return
    valid = () if cfg.dataset.disable_validation else _DECODING_OPTIONS
    given = [as_flag(name) for name in valid if getattr(cfg.task, name, False)]
    if getattr(cfg.task, "_name", None) in _DECODING_TASKS:
        given.append(f"--task {cfg.task._name}")
    if given:
        raise ValueError(
            f"{given[0]} translates on each rank alone, and the experts are spread over "
            f"{model.moe_groups.world_size} ranks: give --moe-expert-parallel-size 1, so that each "
            "rank has all experts, or leave it out and use fairseq-generate"
        )


def _moves_load_bias(model, criterion) -> bool:
    """Return whether the load moves a bias; raise or warn if the criterion does not fit."""
    configs = [layer.config for layer in model.moe_layers.values()]
    rules = {config.load_bias for config in configs if config.moves_load_bias}
    name = type(criterion).__name__
    if hasattr(model, "moe_reports_are_collected"):
        return bool(rules)
    if rules and not isinstance(criterion, MoECriterion):
        wanted = f"--criterion {' or '.join(CRITERIONS)}"
        raise ValueError(f"--moe-load-bias {rules.pop()} needs {wanted}, not {name}")
    # fairseq's criterions read one output of the model; a user's may read the others
    if type(criterion).__module__.startswith("fairseq.criterions."):
        logger.warning(
            "%s leaves out the gate loss, so that nothing keeps the experts in balance, and their "
            "metrics and load (--moe-load-log-interval); --criterion moe_cross_entropy has them",
            name,
        )
    return bool(rules)


def _parameters(model) -> str:
    """Describe the parameters of all ranks, and those that a token uses; shared ones count once."""
    groups, params = model.moe_groups, list(model.parameters())
    dense = sum(param.numel() for param in params if not is_expert(param))
    held = [param for param in params if is_expert(param)]
    experts = sum(param.numel() * groups.world_size // copies_of(param, groups) for param in held)
    top_k = next(iter(model.moe_layers.values())).config.top_k
    active = dense + experts * top_k // groups.num_experts
    return (
        f"parameters of all ranks: {dense + experts:,} (dense {dense:,}, experts {experts:,}); "
        f"active per token: {active:,} ({top_k} of {groups.num_experts} experts)"
    )
