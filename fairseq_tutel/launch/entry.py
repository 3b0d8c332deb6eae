"""Become a rank: bind to cores, hold requests back, replace this process by the rank's program.

torch's agent starts ``python entry.py FOLDER`` for each rank. The launcher (agent.py) made the
folder: job.json says what to become, and ``pids`` gets this process's number. This uses the
standard library only.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

REQUESTS = {signal.SIGUSR1, signal.SIGUSR2}  # the launcher passes them on
ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}  # torch passes these on
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# ranks of all nodes, and of those with this node's role: its program and device
_SIZES = ("WORLD_SIZE", "ROLE_WORLD_SIZE")


def say(text: str) -> None:
    """Write a line of the launcher."""
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()


def become(rank: dict[str, Any]) -> NoReturn:
    """Replace this process by a rank, unbound if the machine refuses its cores."""
    try:
        if rank["cpus"] is not None:
            os.sched_setaffinity(0, rank["cpus"])
    except OSError as error:
        say(f"local rank {rank['env']['LOCAL_RANK']} is not bound: {error}")
    # held back until the trainer asks for it (integrations/fairseq/trainer/requeue.py)
    held = {signal.SIGUSR1} if rank["holds"] else ()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    os.execvpe(rank["argv"][0], rank["argv"], {**os.environ, **rank["env"]})


def main(folder: Path) -> NoReturn:
    """Become the local rank that torch's variables name."""
    job = json.loads((folder / "job.json").read_text())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans of a killed launcher
    if os.getppid() != job["launcher"]:
        os._exit(128 + signal.SIGKILL)
    local_rank = int(os.environ["LOCAL_RANK"])
    rank, role = job["ranks"][local_rank], job["role"]
    wanted, started, alike = rank["env"]["WORLD_SIZE"], *map(os.environ.get, _SIZES)
    if not wanted == started == alike:
        if local_rank == 0:
            where = f"node {rank['env']['GROUP_RANK']} expects {wanted} ranks of {role}"
            say(f"error: the nodes do not fit together: {where}, they start {started} ({alike})")
        sys.exit(2)
    # what the launcher ignores it has blocked, because torch gives it handlers
    for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()) & ENDING:
        signal.signal(number, signal.SIG_IGN)
    if local_rank > 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    (folder / "pids" / str(os.getpid())).touch()
    if (folder / "requested").exists():  # before this rank was there
        os.kill(os.getpid(), signal.SIGUSR1)
    become(rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
