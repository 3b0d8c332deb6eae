"""Leave in good order when asked to: save at the end of the update, exit with a code that says so.

Batch systems announce the end of a job's time by a signal (``#SBATCH --signal=USR1@300``). The exit
code tells whoever started the job that it wants to be queued again; the run then resumes where it
stopped.
"""

from __future__ import annotations

import logging
import signal
import threading

from ..distributed import any_rank
from ..exit_codes import EXIT_REQUEUE

logger = logging.getLogger(__name__)


class RequeueRequest:
    """Remembers SIGUSR1; the process goes on until somebody looks."""

    def __init__(self):
        self._seen = False
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
