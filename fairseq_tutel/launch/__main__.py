"""``python -m fairseq_tutel.launch``."""

import signal

# The request to save must not end a launcher that is still starting: kept back, it waits until the
# supervisor asks for it. Scripts start the launcher with it ignored, for the time before this line.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
# Before there are ranks there is nothing to clean up, and a traceback would be noise.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys  # noqa: E402

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
