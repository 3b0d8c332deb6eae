"""Start the ranks of this node, forward signals to them, and end all when one fails."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..command_line import EXIT_GROWN, EXIT_REQUEUE
from .binding import RankBinding, apply_binding
from .output import LineCopier

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_WATCHED = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# exit codes of ranks that leave together after they have saved; see command_line
_AGREED = (EXIT_REQUEUE, EXIT_GROWN)
_FAILED = 1  # Python's exit code after an exception


@dataclass(frozen=True)
class RankJob:
    """One process to start."""

    rank: int
    argv: list[str]
    env: dict[str, str]
    binding: RankBinding
    prefixes: tuple[str, str] = ("", "")  # before each line of standard output, standard error


def say(text: str) -> None:
    """Write a line of the launcher."""
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()


def prepare_for_requests(hold: bool) -> None:
    """Hold SIGUSR1 back, or take it, in the process that becomes a rank.

    If held, it stays blocked until the trainer asks for it (integrations/fairseq/trainer/requeue).
    """
    how = signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK
    signal.pthread_sigmask(how, {signal.SIGUSR1})


def _is_importing(process: subprocess.Popen) -> bool:
    """Return whether a process (not yet reaped) still blocks SIGUSR1; see proc(5)."""
    with open(f"/proc/{process.pid}/status") as status:
        bits = next((line.split()[1] for line in status if line.startswith("SigBlk:")), "0")
    return bool(int(bits, 16) >> (signal.SIGUSR1 - 1) & 1)


@dataclass
class Supervisor:
    """Ranks that run to their end."""

    jobs: Sequence[RankJob]
    grace: float  # seconds between SIGTERM and SIGKILL
    hold_requests: bool = False
    requested: bool = False  # the ranks get a SIGUSR1 as they start; later: whether there was one
    stopped_by: signal.Signals | None = None  # asked the launcher to stop

    def __post_init__(self):
        self._running: dict[int, subprocess.Popen] = {}
        self._copier = LineCopier()
        self._status: int | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run the ranks; return 0, or the exit status of the rank that failed first.

        It is 128 + the signal's number if a signal stopped the launcher and ranks merely died.
        """
        # What was ignored stays so (nohup, or a script's background job): blocking would undo it.
        watched = {n for n in _WATCHED if signal.getsignal(n) != signal.SIG_IGN}
        watched.add(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose the exit codes
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        try:
            # All processes before any thread: preexec_fn must run in a single-threaded process.
            for job in self.jobs:
                self._running[job.rank] = self._start(job, old_mask)
            self._copier.start()
            if self.requested:
                self._send(signal.SIGUSR1)
            while self._running:
                self._wait(watched)
        finally:
            self._kill_all()
            while (late := signal.sigtimedwait(watched, 0)) is not None:
                # a signal to the ranks that came too late must not end the launcher
                self.requested |= late.si_signo == signal.SIGUSR1
                if late.si_signo in _ENDING and self._status == EXIT_GROWN:  # nor let it go on
                    self.stopped_by = self.stopped_by or signal.Signals(late.si_signo)
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._copier.finish()
        status = self._status or 0
        if self.stopped_by is not None and (status in (_FAILED, EXIT_GROWN) or status > 128):
            return 128 + self.stopped_by
        return status

    def _start(self, job: RankJob, mask: set) -> subprocess.Popen:
        parent = os.getpid()

        def in_child() -> None:
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans if the launcher is killed
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)
            apply_binding(job.binding)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask | {signal.SIGUSR1})
            prepare_for_requests(self.hold_requests)

        first = job.rank == self.jobs[0].rank
        # rank 0 keeps a terminal, where lines come whole and a progress bar may be drawn
        piped = [
            len(self.jobs) > 1 and not (first and target.isatty())
            for target in (sys.stdout, sys.stderr)
        ]
        stdout, stderr = (subprocess.PIPE if each else None for each in piped)
        process = subprocess.Popen(
            job.argv,
            env=job.env,
            preexec_fn=in_child,
            start_new_session=True,
            stdin=None if first else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
        )
        streams = zip((process.stdout, process.stderr), (sys.stdout, sys.stderr), strict=True)
        for (source, target), prefix in zip(streams, job.prefixes, strict=True):
            if source is not None:
                self._copier.add(source, target.buffer, prefix, until_refused=first)
        return process

    def _wait(self, watched: set[signal.Signals]) -> None:
        """Handle one signal, or the end of the grace period."""
        received = signal.sigtimedwait(watched, 0.5)
        # Python returns numbers of no signal where the process was stopped until the time was over
        number = None if received is None else received.si_signo
        if number in watched and number != signal.SIGCHLD:
            self._on_signal(signal.Signals(number))
        for rank, process in list(self._running.items()):
            # not reaped yet: until then the number of its group cannot become another's
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            if ended.si_status != 0:
                os.killpg(process.pid, signal.SIGKILL)  # data loader workers that it left behind
            del self._running[rank]
            code = process.wait()
            self._on_exit(rank, 128 - code if code < 0 else code)  # as a shell has it
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            say(f"ranks {sorted(self._running)} are still there; killing them")
            self._kill_all()

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in _ENDING:
            self.requested |= number == signal.SIGUSR1
            self._send(number)
        elif self.stopped_by is not None:  # a second Ctrl-C: at once
            self._kill_all()
        else:
            self.stopped_by = number
            if self._status is None:
                say(f"asked to stop by {number.name}; ending the ranks")
            self._send(number)
            self._kill_at = time.monotonic() + self.grace

    def _on_exit(self, rank: int, status: int) -> None:
        if status == 0 or not (self._status is None or self._status in _AGREED):
            return
        if status in _AGREED:
            # The ranks have agreed to leave; give the others the time to do so on their own.
            self._status = status
            self._kill_at = self._kill_at or time.monotonic() + 2 * self.grace
            return
        self._status = status
        if self.stopped_by is not None:
            return  # as it was asked to
        how = f"died of signal {status - 128}" if status > 128 else f"ended with exit code {status}"
        say(f"rank {rank} {how}" + ("; ending the others" if self._running else ""))
        if self._running:
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + self.grace

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            # while it imports there is nothing to put in order, and Python would print a traceback
            quietly = number == signal.SIGINT and self.hold_requests and _is_importing(process)
            # not Popen.send_signal, which would reap a rank that has just ended
            os.kill(process.pid, signal.SIGTERM if quietly else number)

    def _kill_all(self) -> None:
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)
