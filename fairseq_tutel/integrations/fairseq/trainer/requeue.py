"""Stop on SIGUSR1: finish the update, save, exit with a code that asks for "requeue".

A process may also begin again, when its set has more experts.
Batch systems announce the end of a job's time by a signal (``#SBATCH --signal=USR1@300``).
Validation, checkpoints and the end of an epoch or run that are due after the update come first, so
that an interrupted run does what an uninterrupted one does.
"""

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from ....command_line import EXIT_REQUEUE, GOES_ON, LAUNCHER, OUTCOME
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
        """Return whether any rank was asked until now, from when on it is not told. Collective."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return any(gather_texts("1" if self._seen else None))


def leave(path: str) -> NoReturn:
    """End the process after its state was saved, as all others do, for "requeue". Collective."""
    logger.info("SIGUSR1: saved %s, leaving with exit code %d", path, EXIT_REQUEUE)
    gather_texts(None)  # torch's agent, and mpirun, end the others when one leaves with a code
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        raise SystemExit(EXIT_REQUEUE)
    Path(launcher, OUTCOME).write_text(str(EXIT_REQUEUE))
    raise SystemExit(0)


def begin_again(path: str) -> NoReturn:
    """Replace this process by one that runs its command from its last checkpoint. Collective.

    The ranks meet at another port: torch's agent, or rank 0's old process, has the old one.
    """
    logger.info("--moe-grow-at: saved %s; all ranks begin again from there", path)
    with socket.create_server(("", 0)) as probe:
        port = gather_texts(str(probe.getsockname()[1]))[0]  # rank 0's, where the ranks meet
    atexit.unregister(signal.signal)  # requests that are held back wait for the new process
    atexit._run_exitfuncs()  # of logs, and of workers, which would live on as the new process's
    time.sleep(1)  # connections end with this process: others may still read from them
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder is closed
            os.set_inheritable(int(file), int(file) < 3)
    again = {GOES_ON: "1", "MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **again})


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
