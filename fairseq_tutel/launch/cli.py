"""Command line of the launcher."""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..command_line import EXIT_REQUEUE, EXIT_USAGE, LAUNCHER, CommandLine
from ..command_line.starters import STARTERS, end_step
from ..config.options import Range, at_least, in_range
from .agent import run_ranks
from .commands import parse_command
from .entry import become, say
from .job import NCCL_PROFILES, prepare_job

_DESCRIPTION = """\
Starts the ranks of COMMAND on this machine, as torchrun does, or adopts the rank that torchrun,
srun or mpirun has started. It binds each rank to the cores next to its GPU, and adds the options
that fairseq needs to form one job of them. Other programs find torchrun's variables.
"""
_EPILOG = f"""\
Options of COMMAND, and variables that are set, win over what the launcher would add. The exit code
is that of the rank that failed first ({EXIT_REQUEUE}: the ranks saved a checkpoint on SIGUSR1 and
want to be queued again). LOGLEVEL=INFO shows what torch logs.
"""


class _CommandLine(CommandLine):
    """Parser that names the ``--`` without which it takes options of COMMAND for its own."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; options of COMMAND go behind it: [options] -- COMMAND [ARGUMENT ...]"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the launcher's own options; the command of the ranks follows ``--``."""
    parser = _CommandLine(
        prog="python -m fairseq_tutel.launch", description=_DESCRIPTION, epilog=_EPILOG,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add, positive = parser.add_argument, in_range(int, at_least(1))
    # fmt: off
    add("--nproc-per-node", type=lambda text: None if text == "auto" else positive(text),
        metavar="N|auto", help="ranks to start on this node; "
        "auto: COMMAND's own world size, or one per visible GPU, or 1 (default: auto)")
    add("--nnodes", type=positive, metavar="N", help="nodes of the job, each "
        "running this launcher (default: as srun or mpirun have it)")
    add("--node-rank", type=in_range(int, at_least(0)), metavar="I",
        help="this node's number, from 0 on")
    add("--master-addr", metavar="HOST", help="host of rank 0 (default: MASTER_ADDR, or the first "
        "of SLURM's nodes, or this machine)")
    add("--master-port", type=in_range(int, Range(1, 65535)), metavar="PORT",
        help="port on that host (default: MASTER_PORT, or a free port, or one from the job's id)")
    add("--bind", default="auto", metavar="auto|none|SETS", help="auto: each rank "
        "gets its share of the cores of its GPU's NUMA node; without a GPU, slices of the usable "
        "cores. none: bind nothing. SETS: a CPU list for each local rank, as in 0-11:12-23 "
        "(default: auto)")
    add("--nccl-profile", default="none", choices=NCCL_PROFILES, help="NCCL's variables by name; "
        "the launcher's page says what for (default: none)")
    add("--dry-run", action="store_true", help="print commands and binding, and start nothing")
    # fmt: on
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(root="/")  # of /sys, /dev and /proc; another one in tests
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the launcher; return the exit code, 2 for an error in the options."""
    options, env = build_parser().parse_args(argv), dict(os.environ)
    words = options.command[options.command[:1] == ["--"] :]
    try:
        job = prepare_job(options, parse_command(words, env.get("PATH")), env)
    except ValueError as error:
        several = options.nnodes or any(starter.is_here(env) for starter in STARTERS)
        say(f"error{several and f' on {socket.gethostname()}' or ''}: {error}")
        if not options.dry_run:
            end_step(env)
        return EXIT_USAGE
    for line in job.summary.splitlines() if job.place.rank == 0 else ():
        say(line)
    for rank in job.ranks if options.dry_run else ():
        new = {k: v for k, v in rank["env"].items() if env.get(k) != v}
        settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(new.items()))
        sys.stdout.write(f"{settings} {shlex.join(rank['argv'])}\n")
    if options.dry_run:
        return 0
    if job.place.adopted and job.place.by != "srun":  # srun lets ranks wait for one that died
        os.environ.pop(LAUNCHER, None)
        become(job.ranks[0])
    return run_ranks(job, env)
