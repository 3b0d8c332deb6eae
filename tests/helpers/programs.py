"""Many command lines, forked from one process that has made the four seconds of imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fairseq_tutel.launch.commands import parse_command, rank_options, with_options

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a command ended. status: as subprocess has it; of several ranks the first that is not 0,
    and the lines of ranks above 0 begin with [rank N], as the launcher shows them."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr


def environment_outside_jobs() -> dict[str, str]:
    """This process's, without what tells of ranks, and with this package first on the path."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    outside = {
        key: value for key, value in os.environ.items()
        if key not in drop and not key.startswith(("SLURM_", "OMPI_", "PMI_"))
    }  # fmt: skip
    return {**outside, "PYTHONPATH": path}


def requeued_in(update: int) -> str:
    """A prelude that makes fairseq-train send itself SIGUSR1 in the middle of an update."""
    return f"""
import os, signal
from fairseq.trainer import Trainer
train_step = Trainer.train_step

def with_signal(self, *args, **kwargs):
    if self.get_num_updates() == {update} - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return train_step(self, *args, **kwargs)

Trainer.train_step = with_signal
"""


class Programs:
    """Starts the server of :mod:`helpers.program_server`; use it as a context manager."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._meetings = count()
        # of its own: libraries that are imported may write to standard output
        answers, written = os.pipe()
        self._answers = os.fdopen(answers)
        server = Path(__file__).with_name("program_server.py")
        self._server = subprocess.Popen(
            [sys.executable, server, folder / "pycache", str(written)],
            text=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(written,),
            env={
                **environment_outside_jobs(), "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",  # of Hydra's before a program has begun
            },
        )  # fmt: skip
        os.close(written)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *exception) -> None:
        self._server.stdin.close()
        self._server.wait(60)  # it may still import
        self._answers.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        ranks: int = 1,
        cwd: Path = ROOT,
        timeout: float = 60.0,
        text: str = "",
        prelude: str = "",
        launched: bool = True,
        **env: str,
    ) -> Outcome:
        """Run a console script of fairseq's (``fairseq-train``) or ``-m`` and a module.

        Several ranks get a rank's variables, and if ``launched`` the launcher's options; ``text``
        is standard input, ``prelude`` is Python that runs first.
        """
        processes = []
        several = ranks > 1 and launched
        words = self._words_of_ranks(argv, ranks) if several else [list(argv)] * ranks
        for rank, words_of_rank in enumerate(words):
            streams = [self._folder / f"{name}-{rank}" for name in ("stdin", "stdout", "stderr")]
            streams[0].write_text(text)
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            processes.append(
                {
                    "argv": words_of_rank,
                    "cwd": str(cwd),
                    "env": {**(place if ranks > 1 else {}), **env},
                    "prelude": prelude,
                    "streams": [str(stream) for stream in streams],
                }
            )
        request = json.dumps({"processes": processes, "timeout": timeout})
        self._server.stdin.write(f"{request}\n")
        self._server.stdin.flush()
        statuses = json.loads(self._answers.readline())
        return Outcome(
            next((status for status in statuses if status), 0),
            *("".join(self._shown(name, rank) for rank in range(ranks))
              for name in ("stdout", "stderr")),
        )  # fmt: skip

    def _words_of_ranks(self, argv: Sequence[str], ranks: int) -> list[list[str]]:
        """A command of fairseq's for each rank; they meet through a file."""
        meeting = f"file://{self._folder}/meeting-{next(self._meetings)}"
        key = "distributed_init_method"
        hydra = parse_command(argv).kind == "hydra"
        added = [f"distributed_training.{key}={meeting}"] if hydra else [
            "--distributed-init-method", meeting
        ]  # fmt: skip
        command = parse_command([*argv, *added])
        if command.kind == "sharded":  # in place of the launcher's address and port
            meeting = [*added, "--distributed-no-spawn", "--distributed-backend", "gloo"]
            command = parse_command([*argv, *meeting])
        words = []
        for rank in range(ranks):
            options = rank_options(
                command, rank=rank, world_size=ranks, device=0, shared_node=True, cpu=True
            )
            words.append([argv[0], *with_options(command, options)[len(command.program) :]])
        return words

    def _shown(self, stream: str, rank: int) -> str:
        text = (self._folder / f"{stream}-{rank}").read_text()
        if rank == 0:
            return text
        return "".join(f"[rank {rank}] {line}" for line in text.splitlines(keepends=True))
