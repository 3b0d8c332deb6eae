"""Starts the ranks of this node, forwards signals to them, and ends all when one fails."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

from ..exit_codes import EXIT_REQUEUE
from .binding import RankBinding, apply_binding

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_WATCHED = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FAILED = 1  # Python's exit code after an exception
# a line of level INFO as fairseq's programs, and Hydra's, log it
_INFO = re.compile(rb"[\d-]+ [\d:]+ \| INFO \| |\[[\d-]+ [\d:,]+\]\[[\w.]+\]\[INFO\] - ")
# What becomes of SIGUSR1 in a rank that is still importing. held: it is blocked, and so kept by the
# kernel over exec, until this package, which the rank will import, asks for it
# (hosts/fairseq/requeue.py); ignored: lost, until the rank has a handler; default: it kills.
EarlyRequest = Literal["held", "ignored", "default"]
# what torch's store prints of a rank that a signal interrupts while it waits for the others
_FRAME = re.compile(
    rb"\[[WE]\d{4} .*\[c10d\]|Exception raised from |frame #\d+: |<omitting python frames>|\s*$"
)


@dataclass(frozen=True)
class RankJob:
    """One process to start. prefix: put before every line of its output; None: left as it is.
    without_info: of a program of fairseq's, whose lines of level INFO are those of another rank."""

    rank: int
    argv: list[str]
    env: dict[str, str]
    binding: RankBinding
    prefix: str | None = None
    without_info: bool = False


def exit_status(returncode: int) -> int:
    """subprocess' return code as a shell's: death by signal N is 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def prepare_for_requests(early: EarlyRequest) -> None:
    """In the process that becomes a rank, with SIGUSR1 blocked until here (see __main__.py)."""
    if early == "held":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return
    if early == "ignored":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _has_sigusr1_in(pid: int, mask: Literal["SigBlk", "SigIgn"]) -> bool:
    """Whether a process (not yet reaped) blocks or ignores SIGUSR1; see proc(5)."""
    with open(f"/proc/{pid}/status") as status:
        bits = next((line.split()[1] for line in status if line.startswith(f"{mask}:")), "0")
    return bool(int(bits, 16) >> (signal.SIGUSR1 - 1) & 1)


def _copy_lines(
    source: BinaryIO,
    target: BinaryIO,
    job: RankJob,
    lock: threading.Lock,
    stopping: Callable[[], bool],
) -> None:
    readers, prefix = True, (job.prefix or "").encode()
    for line in source:
        if job.without_info and _INFO.match(line) or stopping() and _FRAME.match(line):
            continue
        if not readers:
            continue  # the rank would block for ever on a full pipe that is not emptied
        with lock:
            try:
                target.write(prefix + line)
                target.flush()
            except OSError:  # as with `| head`: nobody reads the launcher's output any longer
                readers = False


def _peek(process: subprocess.Popen) -> int | None:
    """Exit code or signal of a process that has ended, None while it runs.

    It is not reaped: until it is, the number of its process group cannot become another's.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_status


def _kill_group(process: subprocess.Popen) -> None:
    """SIGKILL to a rank not yet reaped, and all of its children (data loader workers)."""
    os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Runs ``jobs`` to their end.

    grace: seconds between SIGTERM and SIGKILL. early_request: see EarlyRequest; a rank that ignores
    SIGUSR1 gets it as soon as it does so no longer.
    """

    def __init__(
        self, jobs: Sequence[RankJob], grace: float, early_request: EarlyRequest = "default"
    ):
        self._jobs = jobs
        self._grace = grace
        self._early_request = early_request
        self._running: dict[int, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []
        self._status: int | None = None
        self._kill_at: float | None = None
        self._unasked: set[int] = set()  # ranks that have still to get SIGUSR1
        self._watched: set[signal.Signals] = set()
        self.stopped_by: signal.Signals | None = None

    def run(self) -> int:
        """The exit status: 0, or that of the rank that failed first.

        Where a signal stopped the launcher and its ranks merely died, 128 + that signal's number.
        """
        # What was ignored stays so (nohup, or a script's background job): blocking would undo it.
        self._watched = {n for n in _WATCHED if signal.getsignal(n) != signal.SIG_IGN}
        self._watched.add(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose the exit codes
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        try:
            # All processes before any thread: preexec_fn must run in a single-threaded process.
            for job in self._jobs:
                self._running[job.rank] = self._start(job, old_mask)
            self._start_readers()
            while self._running:
                self._wait()
        finally:
            self._kill_all()
            while signal.sigtimedwait(self._watched, 0) is not None:
                continue  # a signal to the ranks that came too late must not end the launcher
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        for reader in self._readers:
            reader.join(timeout=5)
        status = self._status or 0
        if self.stopped_by is not None and (status == _FAILED or status > 128):
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
            prepare_for_requests(self._early_request)

        piped = subprocess.PIPE if job.prefix is not None else None
        return subprocess.Popen(
            job.argv,
            env=job.env,
            preexec_fn=in_child,
            start_new_session=True,
            stdin=None if job.rank == self._jobs[0].rank else subprocess.DEVNULL,
            stdout=piped,
            stderr=piped,
        )

    def _start_readers(self) -> None:
        lock = threading.Lock()
        for job in self._jobs:
            if job.prefix is None:
                continue
            process = self._running[job.rank]
            for source, target in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            ):
                reader = threading.Thread(
                    target=_copy_lines,
                    args=(source, target, job, lock, lambda: self.stopped_by is not None),
                    daemon=True,
                )
                reader.start()
                self._readers.append(reader)

    def _wait(self) -> None:
        """Handles one signal, or the time-out of one of the clocks."""
        received = signal.sigtimedwait(self._watched, 0.5)
        if received is not None and received.si_signo != signal.SIGCHLD:
            self._on_signal(signal.Signals(received.si_signo))
        for rank, process in list(self._running.items()):
            ended = _peek(process)
            if ended is None:
                continue
            if ended != 0:
                _kill_group(process)  # what it has left behind
            del self._running[rank]
            self._on_exit(rank, exit_status(process.wait()))
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._say(f"ranks {sorted(self._running)} are still there; killing them")
            self._kill_all()
        self._ask()

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self._unasked = set(self._running)
            self._ask()
        elif number == signal.SIGUSR2:
            self._send(number)
        elif self.stopped_by is not None:  # a second Ctrl-C: at once
            self._kill_all()
        else:
            self.stopped_by = number
            if self._status is None:
                self._say(f"asked to stop by {number.name}; ending the ranks")
            self._stop(number)
            self._kill_at = time.monotonic() + self._grace

    def _ask(self) -> None:
        """Passes SIGUSR1 on to the ranks that have not had it and can take it."""
        for rank in sorted(self._unasked):
            process = self._running.get(rank)
            if process is not None:
                if self._early_request == "ignored" and _has_sigusr1_in(process.pid, "SigIgn"):
                    continue
                os.kill(process.pid, signal.SIGUSR1)
            self._unasked.discard(rank)

    def _stop(self, number: signal.Signals) -> None:
        """Passes on a signal to end. A rank that is still importing has nothing to put in order:
        SIGTERM ends it without the traceback that SIGINT would print."""
        for process in self._running.values():
            importing = self._early_request == "held" and _has_sigusr1_in(process.pid, "SigBlk")
            quietly = importing and number == signal.SIGINT
            os.kill(process.pid, signal.SIGTERM if quietly else number)

    def _on_exit(self, rank: int, status: int) -> None:
        if status == 0 or not (self._status is None or self._status == EXIT_REQUEUE):
            return
        if status == EXIT_REQUEUE:
            # The ranks have agreed to leave; give the others the time to do so on their own.
            self._status = status
            self._kill_at = self._kill_at or time.monotonic() + 2 * self._grace
            return
        self._status = status
        if self.stopped_by is not None:
            return  # as it was asked to
        how = f"died of signal {status - 128}" if status > 128 else f"ended with exit code {status}"
        self._say(f"rank {rank} {how}" + ("; ending the others" if self._running else ""))
        if self._running:
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace

    def _send(self, number: signal.Signals) -> None:
        # not Popen.send_signal, which would reap a rank that has just ended
        for process in self._running.values():
            os.kill(process.pid, number)

    def _kill_all(self) -> None:
        for process in self._running.values():
            _kill_group(process)

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"launch: {text}\n")
        sys.stderr.flush()
