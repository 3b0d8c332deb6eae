"""Replaced attributes of fairseq, and of Python in fairseq's programs: ``TABLE``.

Registration, subclasses and options are used wherever fairseq has them. Elsewhere an attribute is
replaced, once, by a function that calls the original unless experts are involved.
"""

import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...checkpoint import find_checkpoint, safe_globals_only
from . import optim
from .errors import excepthook, log_filters
from .models import ARCHITECTURES
from .options import data_tags
from .options.command_line import with_evaluation_flags
from .options.options import moe_frequencies
from .programs import blocks, evaluation, generation, program, ranks, validation
from .programs.trace import trace_evaluation
from .trainer import requeue
from .trainer.growth import follow_set
from .trainer.sets import save_due_sets, start_of_run
from .trainer.trainer import MoETrainer, has_experts, refuse_unsaid_experts


def install() -> None:
    """Put the replacements into place, once."""
    if getattr(checkpoint_utils, "_fairseq_tutel", False):
        return
    checkpoint_utils._fairseq_tutel = True
    for where, make in TABLE.items():
        path, _, name = where.rpartition(".")
        if path.startswith("fairseq_cli."):
            _replace_in_program(path, name, make)
        elif make is not None:
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, make(getattr(owner, name)))
    _memoize_user_dir()
    excepthook.install()
    if program() is not None:
        log_filters.install()


def _by(function: Callable) -> Callable[[Any], Any]:
    """Return a ``make`` whose replacement calls ``function(original, *arguments)``."""

    def make(original):
        @functools.wraps(original)  # processes that are spawned find it by the original's name
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        return replacement

    return make


def _new_trainer(original, cls, cfg, task, model, *args, **kwargs):
    """Choose the trainer; Python then calls __init__ of the subclass that is returned."""
    if cls is Trainer:
        refuse_unsaid_experts(model)
        if has_experts(model):
            return original(MoETrainer)
    ranks.allow_ranks_on_cpu(cfg)
    return original(cls)


def _save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    if not isinstance(trainer, MoETrainer):
        return original(cfg, trainer, epoch_itr, val_loss)
    # fairseq keeps the best metric as an attribute of this function, which now is our replacement
    keeper = checkpoint_utils.save_checkpoint
    if val_loss is not None:
        best = max if cfg.maximize_best_checkpoint_metric else min
        keeper.best = best(val_loss, getattr(keeper, "best", val_loss))
    if cfg.no_save:
        return None
    return save_due_sets(cfg, trainer, epoch_itr, val_loss, getattr(keeper, "best", None))


def _load_checkpoint(original, cfg, trainer, **passthrough_args):
    if not isinstance(trainer, MoETrainer):
        return original(cfg, trainer, **passthrough_args)
    with start_of_run(cfg):
        return original(cfg, trainer, **passthrough_args)


def _load_to_cpu(original, path, arg_overrides=None, load_on_all_ranks=False):
    if evaluation.is_moe_checkpoint(path):
        return evaluation.load_state(path, arg_overrides)
    with safe_globals_only():
        return original(path, arg_overrides, load_on_all_ranks)


def _file_of_set(original, filename, suffix, shard_idx, num_shards):
    if filename is None:
        raise ValueError("--path is missing; give the checkpoint to evaluate")
    found = find_checkpoint(filename) if num_shards == 1 else None
    if found is not None and found[1] != filename:
        return found[1]
    file = original(filename, suffix, shard_idx, num_shards)
    if not PathManager.exists(file):
        beside = evaluation.checkpoints_beside(file)
        raise FileNotFoundError(f"Model file not found: {file}{beside}")
    return file


def _load_model_ensemble_and_task(original, *args, **kwargs):
    models, cfg, task = original(*args, **kwargs)
    data_tags.refuse_without_flag(cfg.task, task)
    if any(has_experts(model) for model in models):
        trace_evaluation(models[0], task, cfg.model)
        blocks.evaluate_every_block(task)
        validation.share_validation(task)
        generation.prepare_generation(models, task)
    return models, cfg, task


def _call_main(original, cfg, main, **kwargs):
    name = Path(inspect.unwrap(main).__code__.co_filename).stem
    path = cfg.common_eval.path if name in ("eval_lm", "validate", "interactive") else None
    ours = name == "train" and cfg.model._name in ARCHITECTURES
    asked = any(moe_frequencies(cfg.model)) or getattr(cfg.model, "moe_blocks", None)
    trains = ours or name == "train" and asked
    if trains or path is not None and evaluation.is_moe_checkpoint(path):
        if name == "train":
            follow_set(cfg)
        if name == "interactive":
            ranks.refuse_several_readers()
            evaluation.refuse_other_task(cfg, cfg.common_eval.path)
        else:
            ranks.join_started_ranks(cfg)
        main = ranks.meet_in_time(cfg, main)
    return original(cfg, main, **kwargs)


def _memoize_user_dir() -> None:
    """Let ``--user-dir`` name this package by any path: fairseq compares them as written."""
    package = Path(__file__).resolve().parents[2]
    folders = (Path(__file__).absolute().parents[3], Path.cwd(), Path(utils.__file__).parent / "..")
    written = {str(package), *(str(folder / package.name) for folder in folders)}
    memo = getattr(utils.import_user_module, "memo", set())
    memo |= {path for path in written if os.path.exists(path) and os.path.samefile(path, package)}
    utils.import_user_module.memo = memo


def _replace_in_program(module_name: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a running program; others are not imported: that sets up logging."""
    file = module_name.replace(".", os.sep) + ".py"
    for module in {sys.modules.get(module_name), sys.modules.get("__main__")} - {None}:
        function = getattr(module, name, None)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(file):
            # other functions of the program look the name up in __globals__, which is not the
            # module's dict in a spawned process
            function.__globals__[name] = module.__dict__[name] = make(function)


# attribute -> function that makes its replacement of it. The comment says what the original does to
# models with experts, or why registration does not help.
TABLE: dict[str, Callable[[Any], Any] | None] = {
    # is named by fairseq_cli.train; a model with experts gets a MoETrainer
    "fairseq.trainer.Trainer.__new__": _by(_new_trainer),
    # copies and removes single files; with experts a checkpoint is a set
    "fairseq.checkpoint_utils.save_checkpoint": _by(_save_checkpoint),
    # looks for one file to distinguish a restart from a first launch
    "fairseq.checkpoint_utils.load_checkpoint": _by(_load_checkpoint),
    # reads one file, and any; here the name of a set leads to its parts, and a file that could run
    # code is refused, for dense models too
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu": _by(_load_to_cpu),
    # asks for one file before it is read
    "fairseq.checkpoint_utils.get_maybe_sharded_checkpoint_filename": _by(_file_of_set),
    # returns the task that makes evaluation batches, which leave out what does not fit; with
    # experts they leave out nothing (programs/blocks.py), and words of a prompt that become <unk>
    # are reported (programs/generation.py)
    "fairseq.checkpoint_utils.load_model_ensemble_and_task": _by(_load_model_ensemble_and_task),
    # has no --is-moe, which published commands pass, to no effect (options/command_line.py)
    "fairseq.options.CommonEvalConfig": with_evaluation_flags,
    # does not connect torchrun's processes if it sees at most one device (programs/ranks.py)
    "fairseq.distributed.utils.call_main": _by(_call_main),
    # needs a GPU and fails beyond 16 KiB; fairseq-validate collects logging outputs with it
    # (programs/validation.py)
    "fairseq.distributed.utils.all_gather_list": _by(validation.all_gather_list),
    # has no --add-data-source-prefix-tags, which the dictionary of NLLB-200 needs
    # (options/data_tags.py)
    "fairseq.data.multilingual.multilingual_data_manager.MultilingualDatasetManager.prepare": _by(
        data_tags.prepare
    ),
    # raises for --fp16-adam-stats without apex; no second adam can be registered (optim.py)
    "fairseq.optim.adam.FairseqAdam.__init__": _by(optim.init_adam),
    # is the point at which a run that was asked to stop (SIGUSR1) has saved all
    "fairseq_cli.train.validate_and_save": _by(requeue.validate_and_save),
    # assumes that ranks do not need each other; here it keeps them in step
    "fairseq_cli.eval_lm.eval_lm": _by(evaluation.eval_lm),
    # connects no processes; those that were started together become one job, whose corpus is scored
    # once (programs/generation.py)
    "fairseq_cli.generate.main": _by(generation.generate),
    "fairseq.scoring.build_scorer": _by(generation.build_scorer),
    # errors/excepthook.py replaces these three, in fairseq's programs
    # prints up to 199 lines of usage; here one
    "argparse.ArgumentParser.error": None,
    # ends before the options of an architecture are known; here it says how to find them
    "argparse.ArgumentParser.format_help": None,
    # prints a traceback per rank for a user's error; here one line
    "sys.excepthook": None,
}
# Fairseq's programs also get handlers of SIGINT (excepthook.py) and SIGUSR1 (requeue.py), and
# filters of known log lines (log_filters.py).
