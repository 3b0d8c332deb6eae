"""Leave in good order when asked to: finish the update, save, exit with a code that says so.

Batch systems announce the end of a job's time by a signal (``#SBATCH --signal=USR1@300``). The exit
code tells whoever started the job that it wants to be queued again; the run then resumes where it
stopped. What is due after an update (validation, checkpoints, the end of an epoch or of the run)
comes first, so that an interrupted run does what an uninterrupted one does: a run whose last update
it was ends as always.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading

from ..distributed import any_rank
from ..exit_codes import EXIT_REQUEUE

logger = logging.getLogger(__name__)


class RequeueRequest:
    """Remembers SIGUSR1; the process goes on until somebody looks.

    Attributes:
        at_next_epoch: decided by all ranks: leave when the next epoch begins.
        watched: whether a program looks after each update; else the trainer does, at once.
    """

    def __init__(self):
        self._seen = False
        self.at_next_epoch = False
        self.watched = False
        # handlers can be set in the main thread only; elsewhere the signal keeps its default
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._remember)

    def _remember(self, signum, frame):
        self._seen = True

    def made_on_any_rank(self, device) -> bool:
        """Whether any rank was asked. Collective: the signal may not reach all ranks."""
        return any_rank(self._seen, device)


def leave(path: str) -> None:
    """End the process after its state was saved under ``path``."""
    logger.info("SIGUSR1: saved %s, leaving with exit code %d", path, EXIT_REQUEUE)
    raise SystemExit(EXIT_REQUEUE)


def after_each_update(validate_and_save):
    """Make ``fairseq_cli.train.validate_and_save``, called after each update, the place to leave.

    Not where the run ends anyway; at the end of an epoch the trainer leaves as the next one begins,
    since fairseq has still to do what it does between two epochs.
    """

    @functools.wraps(validate_and_save)
    def validate_and_save_and_leave(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
        valid_losses, should_stop = validate_and_save(
            cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch
        )
        request = getattr(trainer, "requeue", None)  # of an MoETrainer
        if request is not None:
            request.watched = True
            if not should_stop and request.made_on_any_rank(trainer.device):
                if not end_of_epoch:
                    leave(trainer.save_last(epoch_itr))
                request.at_next_epoch = True
        return valid_losses, should_stop

    return validate_and_save_and_leave
