"""Many command lines in little time: forked from one process that has made the imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a command ended. status: as subprocess has it."""

    status: int
    stdout: str
    stderr: str


class Programs:
    """Starts the server of :mod:`helpers.program_server`; use it as a context manager."""

    def __init__(self, folder: Path):
        self._folder = folder
        drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        outside = {
            key: value for key, value in os.environ.items()
            if key not in drop and not key.startswith(("SLURM_", "OMPI_", "PMI_"))
        }  # fmt: skip
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("program_server.py")], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={
                **outside, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",  # of Hydra's before a program has begun
            },
        )  # fmt: skip

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *exception) -> None:
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path = ROOT,
        timeout: float = 60.0,
        text: str = "",
        prelude: str = "",
        **env: str,
    ) -> Outcome:
        """Run a console script of fairseq's (``fairseq-train``) or ``-m`` and a module.

        Args:
            text: on standard input.
            prelude: Python that the process runs first.
        """
        streams = [self._folder / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(text)
        request = {
            "argv": list(argv),
            "cwd": str(cwd),
            "env": env,
            "prelude": prelude,
            "timeout": timeout,
            "streams": [str(stream) for stream in streams],
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return Outcome(status, *(stream.read_text() for stream in streams[1:]))
