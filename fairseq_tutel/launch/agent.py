"""Run the ranks of this node under torch's elastic agent, in this process, to one exit code.

torch starts, watches and ends the ranks, and meets other nodes. What it lacks is here: requests
(SIGUSR1) reach the ranks, lines stay whole, one line says how the job failed, and nothing that a
failed rank has started is left behind.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ..command_line import EXIT_USAGE, FOLDER, LAUNCHER, OUTCOME
from ..command_line.starters import end_step
from . import entry
from .entry import ENDING, REQUESTS, say
from .job import Job

FRESH = 3600.0  # seconds until files of the launcher are marked as in use


class _WholeLines(io.TextIOBase):
    """Output to which torch copies pieces of files, each behind its rank and a NUL."""

    def __init__(self, file: int, prefix: str):
        self._file, self._prefix, self._lock = file, prefix, threading.Lock()
        self._rests: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Write a line once its end is there; a text without a NUL at once."""
        rank, mark, piece = text.partition("\0")
        line = self._rests.pop(rank, "") + piece if mark else text
        if mark and not line.endswith("\n"):
            self._rests[rank] = line
            return len(text)
        left = (self._prefix.format(rank) + line if mark else line).encode()
        with self._lock:
            while left:
                left = left[os.write(self._file, left) :]
        return len(text)

    def finish(self) -> None:
        """Write what has no end. The ranks have ended."""
        for rank in list(self._rests):
            self.write(f"{rank}\0\n")


def run_ranks(job: Job, env: Mapping[str, str]) -> int:
    """Return 0, EXIT_REQUEUE, the code of the rank that failed first, or 128 + a signal."""
    # what becomes of a store that is not there yet is no warning
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    importlib.import_module("torch.distributed.run")  # a signal meanwhile finds nothing to tidy
    # torch handles these even where nohup or a shell has them ignored
    ignored = {number for number in ENDING if signal.getsignal(number) == signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS | ignored)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose the exit codes
    given = env.get(FOLDER, "") if job.place.rank == 0 else ""
    folder = Path(given if os.path.isdir(given) else tempfile.mkdtemp(prefix="fairseq_tutel_"))
    pids, outcome = folder / "pids", folder / OUTCOME
    pids.mkdir()
    level = env.get("TORCH_CPP_LOG_LEVEL", "")  # which _run changes
    for rank in job.ranks:
        rank["env"].update({LAUNCHER: str(folder), FOLDER: "", "TORCH_CPP_LOG_LEVEL": level})
    started = {"launcher": os.getpid(), "role": job.role, "ranks": job.ranks}
    (folder / "job.json").write_text(json.dumps(started))
    threading.Thread(target=_pass_on_requests, args=(folder,), daemon=True).start()
    try:
        if code := _run(job, folder, env):
            for pid in pids.glob("*"):  # what is left of its group, as data loader workers
                with contextlib.suppress(OSError):
                    os.killpg(int(pid.name), signal.SIGKILL)
        return code or (int(outcome.read_text()) if outcome.exists() else 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pass_on_requests(folder: Path) -> None:
    """Send each request to the ranks; it is blocked in other threads, and in ranks that begin."""
    while True:
        came = signal.sigtimedwait(REQUESTS, FRESH)
        with contextlib.suppress(OSError):  # the job is over
            if came is None:  # cleaners of /tmp remove what is old
                for path in (folder, *folder.rglob("*")):
                    os.utime(path)
                continue
            if came.si_signo == signal.SIGUSR1:  # for ranks that are not there yet
                (folder / "requested").touch()
            for pid in os.listdir(folder / "pids"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), came.si_signo)


def _run(job: Job, folder: Path, env: Mapping[str, str]) -> int:
    """Return the code of the ranks' end; if it is not good, say it in one line."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in env:  # torchrun's variable; else its log lines go nowhere
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    ranks, shared = len(job.ranks), job.ranks[0]["env"]
    nodes, node = job.place.world_size // ranks, job.place.rank // ranks
    where = f"{shared['MASTER_ADDR']}:{shared['MASTER_PORT']}"
    meeting = {"rdzv_backend": "static", "rdzv_endpoint": where, "rdzv_configs": {"rank": node}}
    logs = DefaultLogsSpecs(str(folder), tee=dict.fromkeys(range(1, ranks), Std.ALL))
    how = {"logs_specs": logs, "log_line_prefix_template": "${rank}\0", "max_restarts": 0}
    config = LaunchConfig(nodes, nodes, ranks, run_id="launch", role=job.role, **meeting, **how)
    # fairseq-generate prints its results: programs look for lines that begin with H-
    out = _WholeLines(1, "" if job.prints_results else "[rank {}] ")
    err = _WholeLines(2, "[rank {}] ")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            elastic_launch(config, sys.executable)("-I", "-S", entry.__file__, str(folder))
        return 0
    except SignalException as stop:
        say(f"stopped by {stop.sigval.name}")
        return 128 + stop.sigval
    except ChildFailedError as failed:
        # of those that ended together, a rank that a signal killed is no victim of another's end
        failures = failed.failures.items()
        rank, failure = min(
            failures, key=lambda f: f[1].exitcode in (-signal.SIGTERM, abs(f[1].exitcode))
        )
        died, code = failure.exitcode < 0, abs(failure.exitcode)
        say(f"rank {rank} {'died of signal' if died else 'ended with exit code'} {code}")
        code += 128 * died
    except (OSError, RuntimeError) as error:
        what = f"node {node} of {nodes} did not meet the others at {where}: "
        why = str(error).partition("\n")[0]  # torch's message goes on with a C++ stack
        say(f"error: {what if isinstance(error, DistError) else ''}{why}")
        code = EXIT_USAGE
    finally:
        for number in ENDING:  # what comes now finds nothing to end
            signal.signal(number, signal.SIG_IGN)
        for each in (out, err):
            with contextlib.suppress(OSError):  # nobody reads it
                each.finish()
    if nodes > 1:
        time.sleep(1)  # a rank of another node may be the cause: its launcher names it meanwhile
    end_step(env)
    return code
