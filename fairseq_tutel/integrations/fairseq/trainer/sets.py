"""Sets that a run starts from, writes and removes, by fairseq's options for single files."""

import contextlib
import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from operator import ge, le

import numpy as np
from fairseq.data import data_utils
from omegaconf import open_dict

from .... import checkpoint
from ....distributed import gather_texts, process_world
from ....training import all_ranks

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def start_of_run(checkpoint_cfg) -> Iterator[None]:
    """Prepare for stock ``load_checkpoint`` with fairseq's ``checkpoint`` config. Collective.

    Within the context, options for a first launch are gone if there is a set to go on from (stock
    looks for one file), and ``--finetune-from-model`` may name a set.
    """
    # without saves the folder may be another run's
    if not checkpoint_cfg.no_save and process_world()[1] > 1:
        checkpoint.check_shared_directory(checkpoint_cfg.save_dir, ranks=all_ranks())
    source, values = checkpoint_cfg.get("finetune_from_model"), {}
    last = os.path.join(checkpoint_cfg.save_dir, "checkpoint_last.pt")
    if checkpoint_cfg.restore_file == "checkpoint_last.pt" and checkpoint.set_exists(last):
        values = {"finetune_from_model": None, "continue_once": None}
    elif source is not None and (found := checkpoint.find_checkpoint(source)) is not None:
        values = {"finetune_from_model": found[1]}
    with changed(checkpoint_cfg, values):
        yield


@contextlib.contextmanager
def changed(section, values):
    """Change entries of a section of fairseq's config within the context."""
    of_class = isinstance(section, Namespace)  # one without a dataclass
    entries = vars(section) if of_class else section
    values = {key: value for key, value in values.items() if value != entries.get(key)}
    before = {key: entries.get(key) for key in values}
    opened = contextlib.nullcontext if of_class else lambda: open_dict(section)
    with opened():
        entries.update(values)
    try:
        yield
    finally:
        with opened():
            entries.update(before)


def save_due_sets(cfg, trainer, epoch_itr, val_loss, best_so_far):
    """Save the sets that are due, as fairseq's ``save_checkpoint`` does for files. Collective.

    ``best_so_far`` includes ``val_loss``. Return the path of the first set, None if none was due.
    """
    begin = time.perf_counter()
    names = _of_first_rank(_due_names(cfg, trainer, epoch_itr, val_loss, best_so_far))
    if not names:
        return None
    extra_state = progress(trainer, epoch_itr, val_loss, best_so_far)
    first, *others = (os.path.join(cfg.save_dir, name) for name in names)
    trainer.save_checkpoint(first, extra_state)
    for path in others:
        checkpoint.copy_set(first, path, ranks=all_ranks())
    logger.info(
        "Saved checkpoint %s (epoch %d @ %d updates, score %s) (writing took %.1f seconds)",
        *(first, epoch_itr.epoch, trainer.get_num_updates(), val_loss),
        time.perf_counter() - begin,
    )
    for path in _of_first_rank(_superfluous(cfg, epoch_itr)):
        checkpoint.remove_set(path, ranks=all_ranks())
    return first


def _of_first_rank(names: list[str]) -> list[str]:
    """Return rank 0's list on every rank. Collective."""
    return json.loads(gather_texts(json.dumps(names))[0])


def _due_names(cfg, trainer, epoch_itr, val_loss, best_so_far) -> list[str]:
    """Return names of the sets that fairseq's options ask for now; all are copies of one."""
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
    kept = checkpoint.find_sets(cfg.save_dir, _best_pattern(cfg)).values()
    better, worst = (ge, min) if cfg.maximize_best_checkpoint_metric else (le, max)
    return len(kept) < cfg.keep_best_checkpoints or better(val_loss, worst(kept))


def _superfluous(cfg, epoch_itr) -> list[str]:
    """Return sets that the ``--keep-*`` options no longer want."""
    old: list[str] = []
    if not epoch_itr.end_of_epoch() and cfg.keep_interval_updates > 0:
        saved = checkpoint.find_sets(cfg.save_dir, r"checkpoint_\d+_(\d+)\.pt")
        step = cfg.keep_interval_updates_pattern
        paths = [path for path, update in saved.items() if step == -1 or update % step != 0]
        old += paths[cfg.keep_interval_updates :]
    if cfg.keep_last_epochs > 0:
        epochs = checkpoint.find_sets(cfg.save_dir, r"checkpoint(\d+)\.pt")
        old += list(epochs)[cfg.keep_last_epochs :]
    if cfg.keep_best_checkpoints > 0:
        best_first = list(checkpoint.find_sets(cfg.save_dir, _best_pattern(cfg)))
        if not cfg.maximize_best_checkpoint_metric:
            best_first.reverse()
        old += best_first[cfg.keep_best_checkpoints :]
    return old


def progress(trainer, epoch_itr, val_loss, best_so_far) -> dict:
    """Return fairseq's extra state: where the run is."""
    extra_state = {"train_iterator": epoch_itr.state_dict(), "val_loss": val_loss}
    if hasattr(trainer.task, "get_checkpoint_dict"):
        extra_state.update(trainer.task.get_checkpoint_dict())
    parts = {
        "best": best_so_far,
        "moe_expert_load": trainer.expert_load.state(),
        "moe_tuner": trainer.exchange_log.state(),
    }
    return extra_state | {name: part for name, part in parts.items() if part is not None}
