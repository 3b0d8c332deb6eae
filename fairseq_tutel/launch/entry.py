"""Become a rank: bind to cores, hold requests back, replace this process by the rank's program.

torch's agent starts ``python entry.py FOLDER`` for each rank. In the folder, which agent.py made,
job.json says what to become. This uses the standard library only.
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
    # held back until trainer/requeue.py and command_line/startup, which ends it quietly, ask for it
    held = {signal.SIGUSR1, signal.SIGINT} if rank["holds"] else ()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    os.execvpe(rank["argv"][0], rank["argv"], {**os.environ, **rank["env"]})


def main(folder: Path) -> NoReturn:
    """Become the local rank that torch's variables name."""
    job = json.loads((folder / "job.json").read_text())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans of a killed launcher
    if os.getppid() != job["launcher"]:
        os._exit(128 + signal.SIGKILL)
    rank = job["ranks"][local_rank := int(os.environ["LOCAL_RANK"])]
    # ranks of all nodes, and of those with this node's role: its program and device
    started, alike = os.environ["WORLD_SIZE"], os.environ["ROLE_WORLD_SIZE"]
    wanted = rank["env"]["WORLD_SIZE"]
    if not wanted == started == alike:
        where = f"node {rank['env']['GROUP_RANK']} expects {wanted} ranks of {job['role']}"
        if local_rank == 0:
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
