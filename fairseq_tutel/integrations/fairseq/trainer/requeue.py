"""Stop on SIGUSR1: finish the update, save, exit with a code that asks for "requeue".

Batch systems announce the end of a job's time by a signal (``#SBATCH --signal=USR1@300``).
Validation, checkpoints and the end of an epoch or run that are due after the update come first, so
that an interrupted run does what an uninterrupted one does.
"""

import atexit
import logging
import signal
import threading

from ....command_line import EXIT_GROWN, EXIT_REQUEUE
from ....distributed import gather_texts

logger = logging.getLogger(__name__)


class RequeueRequest:
    """Record of SIGUSR1, also of one that the launcher held back while the process was starting."""

    def __init__(self):
        self._seen = False
        # sum of the votes of all ranks (a number or tensor) at the last update; None before
        self.num_votes = None
        self.at_next_epoch = False  # all ranks decided to leave when the next epoch begins
        self.watched = False  # a program checks after each update; otherwise the trainer does
        # only the main thread can set handlers; elsewhere the signal keeps its default
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._remember)
            # Python removes its handlers before the process ends; a late signal would kill it
            atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def _remember(self, signum, frame):
        self._seen = True

    @property
    def vote(self) -> float:
        """1 if this rank was asked, else 0; summed over the ranks, because others may not be."""
        return float(self._seen)

    def made_on_any_rank(self) -> bool:
        """Return whether any rank was asked before the last update's statistics were summed."""
        return self._seen if self.num_votes is None else bool(self.num_votes > 0)

    def made_meanwhile(self) -> bool:
        """Return whether any rank was asked until now, even after the last update. Collective."""
        return any(gather_texts("1" if self._seen else None))


def leave(path: str, grown: bool = False) -> None:
    """End the process after its state was saved; ``grown``: the run goes on with more experts."""
    why, code = ("--moe-grow-at", EXIT_GROWN) if grown else ("SIGUSR1", EXIT_REQUEUE)
    logger.info("%s: saved %s, leaving with exit code %d", why, path, code)
    raise SystemExit(code)


def validate_and_save(original, cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
    """Run ``fairseq_cli.train.validate_and_save``, which follows each update, then leave if asked.

    At the end of an epoch the trainer leaves when the next one begins: fairseq has work to do.
    """
    valid_losses, should_stop = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    request = getattr(trainer, "requeue", None)  # of an MoETrainer
    if request is not None:
        request.watched = True
        if not should_stop and trainer.must_leave:
            if not end_of_epoch:
                trainer.leave()
            request.at_next_epoch = True
    return valid_losses, should_stop
