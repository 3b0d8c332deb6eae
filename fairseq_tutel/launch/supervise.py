"""Starts the ranks of this node, forwards signals to them, and ends all when one fails."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from fairseq_tutel.exit_codes import EXIT_REQUEUE
from fairseq_tutel.launch.binding import RankBinding, apply_binding

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_WATCHED = {*_ENDING, *_PASSED_ON, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RankJob:
    """One process to start. prefix: put before every line of its output; None: left as it is."""

    rank: int
    argv: list[str]
    env: dict[str, str]
    binding: RankBinding
    prefix: str | None = None


def exit_status(returncode: int) -> int:
    """subprocess' return code as a shell's: death by signal N is 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def _copy_lines(source: BinaryIO, target: BinaryIO, prefix: bytes, lock: threading.Lock) -> None:
    readers = True
    for line in source:
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
    """Runs `jobs` to their end.

    grace: seconds between SIGTERM and SIGKILL. save_request: whether the ranks take SIGUSR1 as a
    request to save and leave with EXIT_REQUEUE (fairseq's training commands under this plugin).
    They then start with SIGUSR1 ignored, so that an early one does not kill a rank that is still
    importing, and it is repeated every repeat_seconds until they leave.
    """

    def __init__(
        self,
        jobs: Sequence[RankJob],
        grace: float,
        save_request: bool = False,
        repeat_seconds: float = 20.0,
    ):
        self._jobs = jobs
        self._grace = grace
        self._save_request = save_request
        self._repeat_seconds = repeat_seconds
        self._running: dict[int, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []
        self._status: int | None = None
        self._kill_at: float | None = None
        self._repeat_at: float | None = None
        self._watched: set[signal.Signals] = set()
        self.stopped_by: signal.Signals | None = None

    def run(self) -> int:
        """The exit status: 0, or that of the rank that failed first."""
        # What was ignored stays so (nohup, or a script's background job): blocking would undo it.
        self._watched = {n for n in _WATCHED if signal.getsignal(n) != signal.SIG_IGN}
        self._watched.add(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose the exit codes
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        # the launcher holds SIGUSR1 back from its first moment on; its ranks must not
        ranks_mask = old_mask - {signal.SIGUSR1}
        try:
            # All processes before any thread: preexec_fn must run in a single-threaded process.
            for job in self._jobs:
                self._running[job.rank] = self._start(job, ranks_mask)
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
        return self._status or 0

    def _start(self, job: RankJob, mask: set) -> subprocess.Popen:
        parent = os.getpid()

        def in_child() -> None:
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans if the launcher is killed
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)
            if self._save_request:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            apply_binding(job.binding)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        piped = subprocess.PIPE if job.prefix is not None else None
        process = subprocess.Popen(
            job.argv, env=job.env, preexec_fn=in_child, start_new_session=True,
            stdin=None if job.rank == self._jobs[0].rank else subprocess.DEVNULL,
            stdout=piped, stderr=piped,
        )
        return process

    def _start_readers(self) -> None:
        lock = threading.Lock()
        for job in self._jobs:
            if job.prefix is None:
                continue
            process, prefix = self._running[job.rank], job.prefix.encode()
            for source, target in (
                (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)
            ):
                reader = threading.Thread(
                    target=_copy_lines, args=(source, target, prefix, lock), daemon=True
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
        if self._repeat_at is not None and now >= self._repeat_at:
            self._repeat_at = now + self._repeat_seconds
            self._send(signal.SIGUSR1)

    def _on_signal(self, number: signal.Signals) -> None:
        if number in _PASSED_ON:
            self._send(number)
            if number == signal.SIGUSR1 and self._save_request:
                self._repeat_at = time.monotonic() + self._repeat_seconds
            return
        if self.stopped_by is not None:  # a second Ctrl-C: at once
            self._kill_all()
            return
        self.stopped_by = number
        self._send(number)
        self._kill_at = time.monotonic() + self._grace

    def _on_exit(self, rank: int, status: int) -> None:
        if status == 0 or not (self._status is None or self._status == EXIT_REQUEUE):
            return
        if status == EXIT_REQUEUE:
            # The ranks have agreed to leave; give the others the time to do so on their own.
            self._status = status
            self._kill_at = self._kill_at or time.monotonic() + 2 * self._grace
            return
        self._status = status
        how = f"died of signal {status - 128}" if status > 128 else f"ended with exit code {status}"
        self._say(f"rank {rank} {how}" + ("; ending the others" if self._running else ""))
        if self._running and self.stopped_by is None:
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
