"""Copy the output of several ranks, a pipe each, to the launcher's, line by line."""

import os
import selectors
import threading
from dataclasses import dataclass
from typing import BinaryIO

# A process that a rank left behind may hold its pipe open. Copying ends once all ranks have ended
# and no pipe has had data for so long.
_IDLE_SECONDS = 1.0
_CHUNK = 2**16


@dataclass
class _Stream:
    source: BinaryIO
    target: BinaryIO
    prefix: bytes
    until_refused: bool
    rest: bytes = b""  # begin of a line
    refused: bool = False


class LineCopier:
    """One thread that copies lines of many pipes, each with the prefix of its rank."""

    def __init__(self):
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, source: BinaryIO, target: BinaryIO, prefix: str, until_refused: bool) -> None:
        """Copy an unbuffered pipe; ``until_refused``: close it when ``target`` has no reader."""
        stream = _Stream(source, target, prefix.encode(), until_refused)
        self._selector.register(source, selectors.EVENT_READ, stream)

    def start(self) -> None:
        """Begin, unless no pipe was added."""
        if self._selector.get_map():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until everything that the ranks wrote is copied. All of them have ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._selector.get_map():
            ready = self._selector.select(_IDLE_SECONDS)
            if not ready and self._ended.is_set():
                break
            for key, _ in ready:
                self._copy(key.data)
        for key in list(self._selector.get_map().values()):
            self._close(key.data)

    def _copy(self, stream: _Stream) -> None:
        chunk = os.read(stream.source.fileno(), _CHUNK)
        lines, newline, stream.rest = (stream.rest + chunk).rpartition(b"\n")
        if newline:
            self._write(stream, lines)
        if not chunk or (stream.refused and stream.until_refused):
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        if stream.rest:
            self._write(stream, stream.rest)
        self._selector.unregister(stream.source)
        stream.source.close()

    @staticmethod
    def _write(stream: _Stream, lines: bytes) -> None:
        if stream.refused:
            return  # a rank would block for ever on a full pipe that is not emptied
        text = b"".join(b"%b%b\n" % (stream.prefix, line) for line in lines.split(b"\n"))
        try:
            stream.target.write(text)
            stream.target.flush()
        except OSError:
            stream.refused = True
