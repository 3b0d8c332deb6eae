"""``python -m fairseq_tutel.launch``."""

import signal

# Kept back until a thread takes requests (agent.py); scripts ignore SIGUSR1 until this line.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
# before there are ranks there is nothing to clean up, and a traceback would be noise
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys  # noqa: E402

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
