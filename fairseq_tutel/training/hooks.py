"""The one place that changes fairseq: seven guarded replacements, each where fairseq has no seam.

Every replacement asks first whether experts are involved and calls the original if not, so that
dense models behave as before. ``install`` can be called any number of times.

1. ``Trainer.__new__``: fairseq_cli.train names its Trainer class directly; a model with experts
   gets a :class:`MoETrainer`, whichever module the name was imported into.
2. ``checkpoint_utils.save_checkpoint`` and ``load_checkpoint``: copy, remove and look for single
   files; with experts a checkpoint is a set.
3. ``checkpoint_utils.load_checkpoint_to_cpu`` and ``get_maybe_sharded_checkpoint_filename``: look
   for one file; the path of a set leads to its parts. A file that could run code when it is read is
   refused, of dense models too; any other file of theirs stock code reads as ever.
   ``load_model_ensemble_and_task`` returns the task that makes an evaluation program's batches;
   they leave nothing out (:mod:`.blocks`).
4. ``fairseq_cli.eval_lm.eval_lm`` and ``fairseq_cli.validate.main``: assume that ranks do not
   need each other. The first is made to; the second refuses several ranks.
   ``fairseq_cli.train.validate_and_save``: the place after an update where a run that was asked to
   leave (SIGUSR1) has done all that was due.
   ``fairseq_cli.generate.main`` decodes everything in every process; each takes its share.
5. ``options.CommonEvalConfig``: knows no ``--is-moe``, which published commands pass; it is
   accepted and has no effect, since the files tell.
6. ``sys.excepthook`` and ``ArgumentParser.error`` of fairseq's programs: a user's mistake is told
   in one line, whether this package finds it (:mod:`.errors`), fairseq (:mod:`.known_mistakes`) or
   its parser (:mod:`.option_errors`), and Ctrl-C in one word. There, known warnings of fairseq's
   dependencies are left out, too (:mod:`.known_warnings`).
7. ``distributed.utils.call_main``: leaves processes that torchrun started alone where it sees one
   device or none; with experts they become one job (:mod:`.ranks`). ``fairseq-eval-lm`` has its
   block size from the checkpoint by default.
"""

import functools
import inspect
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fairseq import checkpoint_utils, options, utils
from fairseq.dataclass.configs import CommonEvalConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from .. import optim
from ..checkpoint import find_checkpoint, harmless_only
from . import blocks, errors, evaluation, known_warnings, ranks, requeue
from .checkpointing import save_set
from .programs import program
from .start import start_of_run
from .trainer import MoETrainer, has_experts


@dataclass
class _CommonEvalConfig(CommonEvalConfig):
    is_moe: bool = field(
        default=False,
        metadata={"help": "accepted for old commands; models with experts are recognised"},
    )


def install() -> None:
    """Put the replacements into place."""
    if getattr(checkpoint_utils, "_fairseq_tutel", False):
        return
    checkpoint_utils._fairseq_tutel = True
    Trainer.__new__ = staticmethod(_new_trainer)
    checkpoint_utils.save_checkpoint = _save_checkpoint(checkpoint_utils.save_checkpoint)
    checkpoint_utils.load_checkpoint = _load_checkpoint(checkpoint_utils.load_checkpoint)
    checkpoint_utils.load_checkpoint_to_cpu = _load_to_cpu(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.get_maybe_sharded_checkpoint_filename = _file_of_set(
        checkpoint_utils.get_maybe_sharded_checkpoint_filename
    )
    checkpoint_utils.load_model_ensemble_and_task = _load_model_ensemble_and_task(
        checkpoint_utils.load_model_ensemble_and_task
    )
    options.CommonEvalConfig = _CommonEvalConfig
    distributed_utils.call_main = _call_main(distributed_utils.call_main)
    _wrap_programs()
    _know_user_dir()
    errors.install()
    if program() is not None:
        known_warnings.install()
    requeue.listen_early()
    optim.install()


def _new_trainer(cls, cfg, task, model, *args, **kwargs):
    """Python calls __init__ of the class that is returned, since it is a subclass."""
    chosen = MoETrainer if cls is Trainer and has_experts(model) else cls
    if not issubclass(chosen, MoETrainer):
        requeue.without_trainer()
    return object.__new__(chosen)


def _save_checkpoint(original):
    @functools.wraps(original)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        if not isinstance(trainer, MoETrainer):
            return original(cfg, trainer, epoch_itr, val_loss)
        # fairseq keeps the best metric as an attribute of whatever has this name
        if val_loss is not None:
            best = max if cfg.maximize_best_checkpoint_metric else min
            save_checkpoint.best = best(val_loss, getattr(save_checkpoint, "best", val_loss))
        if cfg.no_save:
            return None
        return save_set(cfg, trainer, epoch_itr, val_loss, getattr(save_checkpoint, "best", None))

    return save_checkpoint


def _load_checkpoint(original):
    @functools.wraps(original)
    def load_checkpoint(cfg, trainer, **passthrough_args):
        if not isinstance(trainer, MoETrainer):
            return original(cfg, trainer, **passthrough_args)
        with start_of_run(cfg):
            return original(cfg, trainer, **passthrough_args)

    return load_checkpoint


def _load_to_cpu(original):
    @functools.wraps(original)
    def load_checkpoint_to_cpu(path, arg_overrides=None, load_on_all_ranks=False):
        if evaluation.is_moe_checkpoint(path):
            return evaluation.load_state(path, arg_overrides)
        with harmless_only():
            return original(path, arg_overrides, load_on_all_ranks)

    return load_checkpoint_to_cpu


def _file_of_set(original):
    @functools.wraps(original)
    def get_maybe_sharded_checkpoint_filename(filename, suffix, shard_idx, num_shards):
        if filename is None:
            raise ValueError("--path is missing; give the checkpoint to evaluate")
        found = find_checkpoint(filename) if num_shards == 1 else None
        if found is None or found[1] == filename:
            return original(filename, suffix, shard_idx, num_shards)
        return found[1]

    return get_maybe_sharded_checkpoint_filename


def _load_model_ensemble_and_task(original):
    @functools.wraps(original)
    def load_model_ensemble_and_task(*args, **kwargs):
        models, cfg, task = original(*args, **kwargs)
        if any(has_experts(model) for model in models):
            blocks.evaluate_every_block(task)
        return models, cfg, task

    return load_model_ensemble_and_task


def _call_main(original):
    @functools.wraps(original)
    def call_main(cfg, main, **kwargs):
        name = Path(inspect.unwrap(main).__code__.co_filename).stem
        if _meets_experts(name, cfg):
            ranks.join_started_ranks(cfg)
            if name == "eval_lm":
                blocks.use_trained_block_size(cfg)
        return original(cfg, main, **kwargs)

    return call_main


def _meets_experts(name: str, cfg) -> bool:
    """Whether a program of fairseq that may use several ranks is about to run experts on them."""
    if name == "train":
        return getattr(cfg.model, "moe_freq", 0) > 0
    path = cfg.common_eval.path if name in ("eval_lm", "validate") else None
    return path is not None and evaluation.is_moe_checkpoint(path)


def _know_user_dir() -> None:
    """Let ``--user-dir`` and ``user_dir=`` name the package that is imported already.

    fairseq compares paths as they are written; this package's folder may be reached by several.
    """
    package = Path(__file__).resolve().parents[1]
    written = (
        package,
        Path(__file__).absolute().parents[1],
        Path(package.name).absolute(),
        Path(utils.__file__).parent / ".." / package.name,
    )
    memo = getattr(utils.import_user_module, "memo", set())
    memo |= {str(path) for path in written if path.exists() and path.samefile(package)}
    utils.import_user_module.memo = memo


def _wrap_programs() -> None:
    """Where a program is running: imported by its console script, or run as a file or module.

    Programs are not imported for this, since that sets up logging; they import the user dir late
    enough to be there.
    """
    for name, function_name, replacement in (
        ("fairseq_cli.train", "validate_and_save", requeue.after_each_update),
        ("fairseq_cli.eval_lm", "eval_lm", evaluation.in_step),
        ("fairseq_cli.validate", "main", evaluation.on_one_rank),
        ("fairseq_cli.generate", "main", ranks.share_of_data),
    ):
        file = name.replace(".", os.sep) + ".py"
        for module in {sys.modules.get(name), sys.modules.get("__main__")} - {None}:
            function = getattr(module, function_name, None)
            code = getattr(function, "__code__", None)
            if code is None or not code.co_filename.endswith(file):
                continue
            new = replacement(function)
            setattr(module, function_name, new)
            # where the program's other functions look: in a spawned process not the module's dict
            function.__globals__[function_name] = new
