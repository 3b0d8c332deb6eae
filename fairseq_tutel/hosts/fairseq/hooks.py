"""The one place that changes fairseq, and what of Python and logging comes with it: ``TABLE``.

No file of fairseq is edited. Where it has a seam (registration, subclasses, options), the seam is
used; where it has none, an attribute is replaced, once, by a function that asks first whether
experts are involved and calls the original if not, so that dense models behave as before.
``install`` can be called any number of times. ``tests/hosts/fairseq/test_hooks.py`` holds the table
against what really differs in a process before and after.
"""

import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils, utils
from fairseq.dataclass.configs import CommonEvalConfig
from fairseq.trainer import Trainer

from ... import optim
from ...checkpoint import find_checkpoint, harmless_only
from ...models import check_stock_ranges
from . import blocks, evaluation, excepthook, known_warnings, ranks, requeue
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


class Replacement(NamedTuple):
    """One row of the table.

    Attributes:
        where: the attribute that is replaced, dotted.
        why: what the original does with experts, and why no seam serves.
        make: original -> replacement; None where ``install`` of another module does it.
    """

    where: str
    why: str
    make: Callable[[Any], Any] | None = None


def install() -> None:
    """Put the replacements into place."""
    if getattr(checkpoint_utils, "_fairseq_tutel", False):
        return
    checkpoint_utils._fairseq_tutel = True
    for row in TABLE:
        if row.make is not None:
            _replace(row)
    _memoize_user_dir()
    excepthook.install()
    if program() is not None:
        known_warnings.install()
    requeue.listen_early()
    optim.install()


def _replace(row: Replacement) -> None:
    path, _, name = row.where.rpartition(".")
    if path in _PROGRAMS:
        _replace_in_program(path, name, row.make)
        return
    owner = pkgutil.resolve_name(path)
    setattr(owner, name, row.make(getattr(owner, name)))


def _choose_trainer(original):
    def new_trainer(cls, cfg, task, model, *args, **kwargs):
        """Python calls __init__ of the class that is returned, since it is a subclass."""
        chosen = MoETrainer if cls is Trainer and has_experts(model) else cls
        if not issubclass(chosen, MoETrainer):
            requeue.without_trainer()
        return object.__new__(chosen)

    return staticmethod(new_trainer)


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
        if _runs_experts(name, cfg):
            check_stock_ranges(cfg)
            if name != "interactive":
                ranks.join_started_ranks(cfg)
            if name == "eval_lm":
                blocks.use_trained_block_size(cfg)
        return original(cfg, main, **kwargs)

    return call_main


def _runs_experts(name: str, cfg) -> bool:
    """Whether a fairseq program is about to run a model with experts."""
    if name == "train":
        return getattr(cfg.model, "moe_freq", 0) > 0
    path = cfg.common_eval.path if name in ("eval_lm", "validate", "interactive") else None
    return path is not None and evaluation.is_moe_checkpoint(path)


def _memoize_user_dir() -> None:
    """Let ``--user-dir`` and ``user_dir=`` name the package that is imported already.

    fairseq compares paths as they are written; this package's folder may be reached by several.
    """
    package = Path(__file__).resolve().parents[2]
    written = (
        package,
        Path(__file__).absolute().parents[2],
        Path(package.name).absolute(),
        Path(utils.__file__).parent / ".." / package.name,
    )
    memo = getattr(utils.import_user_module, "memo", set())
    memo |= {str(path) for path in written if path.exists() and path.samefile(package)}
    utils.import_user_module.memo = memo


_PROGRAMS = {f"fairseq_cli.{name}" for name in ("train", "eval_lm", "validate", "generate")}


def _replace_in_program(module_name: str, name: str, make: Callable[[Any], Any]) -> None:
    """Where a program is running: imported by its console script, or run as a file or module.

    Programs are not imported for this, since that sets up logging; they import the user dir late
    enough to be there.
    """
    file = module_name.replace(".", os.sep) + ".py"
    for module in {sys.modules.get(module_name), sys.modules.get("__main__")} - {None}:
        function = getattr(module, name, None)
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.endswith(file):
            continue
        new = make(function)
        setattr(module, name, new)
        # where the program's other functions look: in a spawned process not the module's dict
        function.__globals__[name] = new


TABLE = (
    Replacement(
        "fairseq.trainer.Trainer.__new__",
        "fairseq_cli.train names its Trainer class; a model with experts gets a MoETrainer, "
        "whichever module the name was imported into",
        _choose_trainer,
    ),
    Replacement(
        "fairseq.checkpoint_utils.save_checkpoint",
        "copies and removes single files; with experts a checkpoint is a set",
        _save_checkpoint,
    ),
    Replacement(
        "fairseq.checkpoint_utils.load_checkpoint",
        "looks for one file to distinguish a restart from a first launch",
        _load_checkpoint,
    ),
    Replacement(
        "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
        "reads one file; the name of a set leads to its parts. A file that could run code when it "
        "is read is refused, of dense models too; any other of theirs stock code reads as ever",
        _load_to_cpu,
    ),
    Replacement(
        "fairseq.checkpoint_utils.get_maybe_sharded_checkpoint_filename",
        "asks for one file before it is read",
        _file_of_set,
    ),
    Replacement(
        "fairseq.checkpoint_utils.load_model_ensemble_and_task",
        "returns the task that makes an evaluation program's batches, which leave out what does "
        "not fit; with experts they leave nothing out (hosts/fairseq/blocks.py)",
        _load_model_ensemble_and_task,
    ),
    Replacement(
        "fairseq.options.CommonEvalConfig",
        "has no --is-moe, which published commands pass; it is accepted and has no effect, since "
        "the files show it",
        lambda original: _CommonEvalConfig,
    ),
    Replacement(
        "fairseq.distributed.utils.call_main",
        "does not connect processes that torchrun started where it sees one device or none; with "
        "experts they become one job (:mod:`.ranks`). fairseq-eval-lm takes its block size "
        "from the checkpoint",
        _call_main,
    ),
    Replacement(
        "fairseq_cli.train.validate_and_save",
        "is the place after an update where a run that was asked to stop (SIGUSR1) has done all "
        "that was due",
        requeue.after_each_update,
    ),
    Replacement(
        "fairseq_cli.eval_lm.eval_lm",
        "assumes that ranks do not need each other; it is made to keep them in step",
        evaluation.in_step,
    ),
    Replacement(
        "fairseq_cli.validate.main",
        "assumes the same, and refuses several ranks",
        evaluation.on_one_rank,
    ),
    Replacement(
        "fairseq_cli.generate.main",
        "decodes everything in every process; each takes its share",
        ranks.share_of_data,
    ),
    # by the install() of other modules
    Replacement(
        "fairseq.optim.adam.FairseqAdam.__init__",
        "raises where apex is missing and fp16 statistics are asked for (optim/fairseq_adam.py); "
        "a second optimizer named adam cannot be registered",
    ),
    Replacement(
        "argparse.ArgumentParser.error",
        "prints up to 199 lines of usage; in fairseq's programs one line "
        "(hosts/fairseq/option_errors.py)",
    ),
    Replacement(
        "sys.excepthook",
        "prints a traceback per rank for a user's error; in fairseq's programs one line "
        "(hosts/fairseq/excepthook.py)",
    ),
)
# Beside the table, in fairseq's programs: handlers of SIGINT (excepthook.py) and SIGUSR1
# (requeue.py), filters of known warnings (known_warnings.py); in a simulated rank, logging's record
# factory (trainer.py). ARCH_CONFIG_REGISTRY gets a function of the model's own arch name, where
# fairseq registers an empty one (models/transformer_lm_gpt_moe.py).
