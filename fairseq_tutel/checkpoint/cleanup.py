"""What is left behind where a change to a set ends before its time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaning_up(clean: Callable[[bool], None]) -> Iterator[None]:
    """Call ``clean`` unless the block gets to its end; only SIGKILL and a crash go without.

    SIGTERM and SIGHUP end a Python process where it stands. Within the block they clean up first,
    then end it in the same way. A program that ignores or handles them goes on as it does.

    Args:
        clean: called with whether the process is about to end by a signal. It may interrupt the
            block anywhere, and must not raise.
    """

    def clean_and_end(signum, frame):
        clean(True)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    # handlers can be set in the main thread only
    main = threading.current_thread() is threading.main_thread()
    taken = [s for s in _SIGNALS if main and signal.getsignal(s) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, clean_and_end)
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        clean(False)
        raise
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)
