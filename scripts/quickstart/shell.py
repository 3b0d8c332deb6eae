"""Runs a command: all of its output goes to a log, the lines worth seeing to the terminal."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# A command that prints nothing for this long hangs; the slowest silence seen was 20 seconds.
SILENCE_SECONDS = 600
# Longer than the launcher's own patience with its ranks.
GRACE_SECONDS = 20


class CommandFailed(Exception):
    """A command ended with an error; the message names it, and ends with its last lines."""


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class LiveLine:
    """Progress: a line that is overwritten in a terminal, or one of every few lines elsewhere."""

    def __init__(self, every: int = 5):
        self._every = every
        self._count = 0
        self._open = False

    def update(self, text: str) -> None:
        """Show the latest state."""
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"\r\033[K{text[:width]}")
            sys.stdout.flush()
            self._open = True
        elif (self._count + 1) % self._every == 0:
            say(text)
        self._count += 1

    def close(self) -> None:
        """Go to a fresh line, so that what follows does not overwrite the last state."""
        if self._open:
            say()
        self._open = False


def run(
    command: list[str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    env: dict[str, str] | None = None,
) -> list[str]:
    """Run ``command``, append its output (stdout and stderr) to ``log``, and return its lines.

    Raises:
        CommandFailed: it ended with another exit code than 0, or said nothing for
            ``SILENCE_SECONDS``.
    """
    lines: list[str] = []
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        watchdog = _Watchdog(process)
        try:
            for line in process.stdout:
                watchdog.seen()
                file.write(line)
                file.flush()
                lines.append(line.rstrip("\n"))
                on_line(lines[-1])
            status = process.wait()
        finally:
            watchdog.stop()
            _end(process)
    if watchdog.fired:
        raise CommandFailed(
            _failure(command, f"printed nothing for {SILENCE_SECONDS} s", lines, log)
        )
    if status != 0:
        raise CommandFailed(_failure(command, f"ended with exit code {status}", lines, log))
    return lines


class _Watchdog:
    """Ends a silent process."""

    def __init__(self, process: subprocess.Popen):
        self.fired = False
        self._process = process
        self._last = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            if time.monotonic() - self._last > SILENCE_SECONDS:
                self.fired = True
                _end(self._process)
                return

    def seen(self) -> None:
        """The process has printed something."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()


def _end(process: subprocess.Popen) -> None:
    """End the process and what it started; nothing where it has ended by itself."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(command: list[str], what: str, lines: list[str], log: Path) -> str:
    name = next((word for word in command if "fairseq-" in word), command[0])
    tail = "\n".join(f"  {line[:300]}" for line in deque(lines, maxlen=15))
    return f"{Path(name).name} {what}; the last lines of {log}:\n{tail}"
