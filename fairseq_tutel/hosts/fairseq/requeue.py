"""Stop in good order on SIGUSR1: finish the update, save, exit with a code for "requeue".

Batch systems announce the end of a job's time by a signal (``#SBATCH --signal=USR1@300``). The exit
code asks whoever started the job to queue it again; the run then resumes where it stopped. What is
due after an update (validation, checkpoints, the end of an epoch or of the run) comes first, so
that an interrupted run does what an uninterrupted one does: a run whose last update it was ends as
always.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading

import torch

from ...exit_codes import EXIT_REQUEUE
from .programs import TRAINING, program

logger = logging.getLogger(__name__)


class RequeueRequest:
    """Remembers SIGUSR1; the process goes on until the request is read.

    One that the launcher has held back while the process was importing arrives now
    (launch/supervise.py).

    Attributes:
        at_next_epoch: decided by all ranks: leave when the next epoch begins.
        watched: whether a program looks after each update; else the trainer does, at once.
    """

    def __init__(self):
        self._seen = False
        self._num_asked = None
        self._before = signal.SIG_IGN if _is_held() else signal.getsignal(signal.SIGUSR1)
        self.at_next_epoch = False
        self.watched = False
        # handlers can be set in the main thread only; elsewhere the signal keeps its default
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._remember)
            # Python takes its handlers down before the process is gone: it would die of a late one
            atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def _remember(self, signum, frame):
        self._seen = True

    def pass_over(self) -> None:
        """Let the signal do what it did before, also the one that has come meanwhile."""
        signal.signal(signal.SIGUSR1, self._before)
        if self._seen:
            os.kill(os.getpid(), signal.SIGUSR1)

    @property
    def vote(self) -> float:
        """1 where this rank was asked, else 0: summed with the statistics of every update, since
        the signal may not reach all ranks."""
        return float(self._seen)

    def count_votes(self, total) -> None:
        """Take the sum of the votes of all ranks (a number or tensor), the same on each."""
        self._num_asked = total

    def made_on_any_rank(self) -> bool:
        """Whether any rank was asked, before the statistics of the last update were summed."""
        return self._seen if self._num_asked is None else bool(self._num_asked > 0)


_early: RequeueRequest | None = None


def listen_early() -> None:
    """Take requests from now on, where this process is about to train; else let them through."""
    global _early
    if threading.current_thread() is not threading.main_thread() or program() is None:
        return
    if program() in TRAINING and (_is_held() or not _spawns_ranks()):
        _early = RequeueRequest()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def request_for_trainer() -> RequeueRequest:
    """What a trainer looks at: with what has come since the package was imported."""
    global _early
    request, _early = _early or RequeueRequest(), None
    return request


def without_trainer() -> None:
    """The model turned out to have no experts: no trainer reads the request."""
    global _early
    if _early is not None:
        _early.pass_over()
    _early = None


def _is_held() -> bool:
    return signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _spawns_ranks() -> bool:
    """Whether fairseq may start one process per GPU from this one, which is then no rank."""
    return (
        torch.cuda.device_count() > 1
        and multiprocessing.parent_process() is None
        and "WORLD_SIZE" not in os.environ
        and not any("distributed_no_spawn" in word.replace("-", "_") for word in sys.argv)
    )


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
            if not should_stop and request.made_on_any_rank():
                if not end_of_epoch:
                    leave(trainer.save_last(epoch_itr))
                request.at_next_epoch = True
        return valid_losses, should_stop

    return validate_and_save_and_leave
