"""Command line of the launcher."""

import argparse
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..command_line import EXIT_GROWN, EXIT_REQUEUE, EXIT_USAGE, REPORTED, RESTARTS, CommandLine
from ..command_line.starters import STARTERS, is_first_rank
from ..config.options import Range, at_least, in_range
from .binding import apply_binding
from .commands import parse_command
from .job import NCCL_PROFILES, Job, Options, prepare_job
from .preflight import SharedError, compare_nodes
from .restart import restarted
from .supervise import Supervisor, prepare_for_requests, say

_DESCRIPTION = """\
Starts the ranks of COMMAND on this machine, or adopts the rank that torchrun, srun or mpirun
has started, binds each rank to the cores next to its GPU, and adds the options that fairseq needs
to form one job of them. COMMAND is fairseq-train, fairseq-hydra-train, fairseq-eval-lm,
fairseq-validate, fairseq-generate, fairseq-interactive, or any other program, which finds RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.
"""
_EPILOG = f"""\
Options of COMMAND win over what the launcher would add; where they cannot both hold, it stops
and names both. Variables that are already set win, too.
Ranks on the CPU get THP_MEM_ALLOC_ENABLE=1: torch then asks for huge pages for big tensors. Every
rank finds how it was bound in FAIRSEQ_TUTEL_BIND, and the NCCL profile's name in
FAIRSEQ_TUTEL_NCCL_PROFILE. The exit code is that of the rank that failed first
({EXIT_REQUEUE}: the ranks saved a checkpoint on SIGUSR1 and want to be queued again). Ranks that
saved a set with more experts (--moe-grow-at) are started again at once, from their last checkpoint.
"""


def _nproc(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor auto")
    return int(text)


class _CommandLine(CommandLine):
    """Parser that names the ``--`` without which it takes options of COMMAND for its own."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; options of COMMAND go behind it: [options] -- COMMAND [ARGUMENT ...]"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the launcher's own options; the command of the ranks follows ``--``."""
    parser = _CommandLine(
        prog="python -m fairseq_tutel.launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    add, positive, natural = parser.add_argument, in_range(int, at_least(1)), at_least(0)
    # fmt: off
    add("--nproc-per-node", type=_nproc, metavar="N|auto", help="ranks to start on this node; "
        "auto: COMMAND's own world size if it gives one, else one per visible GPU, else 1 "
        "(default: auto)")
    add("--nnodes", type=positive, metavar="N", help="nodes of the job, each running this launcher "
        "(default: as srun or mpirun have it)")
    add("--node-rank", type=in_range(int, natural), metavar="I", help="this node's number from 0 "
        "on, with --nnodes")
    add("--master-addr", metavar="HOST", help="host of rank 0 (default: MASTER_ADDR, or the first "
        "of SLURM's nodes, or this machine)")
    add("--master-port", type=in_range(int, Range(1, 65535)), metavar="PORT",
        help="port on that host (default: MASTER_PORT, or a free port, or one from the job's id)")
    # checked where the nodes meet: other nodes must not wait for the one that refuses it
    add("--bind", default="auto", metavar="auto|none|SETS", help="auto: each rank "
        "gets its share of the cores of its GPU's NUMA node; without a GPU, slices of the usable "
        "cores. none: bind nothing. SETS: a CPU list for each local rank, as in 0-11:12-23 "
        "(default: auto)")
    add("--nccl-profile", default="none", choices=NCCL_PROFILES, help="NCCL's variables by name; "
        "the launcher's page says what for (default: none)")
    add("--output", default="prefix", choices=["prefix", "plain"], help="prefix: lines of ranks "
        "above 0 begin with [rank N], except what fairseq-generate writes to standard output; "
        "plain: no prefix (default: prefix)")
    add("--grace-seconds", type=in_range(float, natural), default=15.0, metavar="S", help="time "
        "between SIGTERM and SIGKILL for the other ranks when one has failed (default: 15)")
    add("--agree-seconds", type=in_range(int, natural), metavar="S", help="how long the "
        "launchers of several nodes wait for each other at MASTER_ADDR:MASTER_PORT, to compare "
        "their ranks before they start them; 0: compare only before a second start, as after "
        "--moe-grow-at (default: 300, and 60 before a second start)")
    add("--dry-run", action="store_true", help="print the ranks' commands and the binding, and "
        "start nothing")
    # fmt: on
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _exec_rank(job: Job) -> None:
    """Replace this process by its rank, so that signals reach the rank directly."""
    rank = job.ranks[0]
    for variable in (RESTARTS, REPORTED):
        rank.env.pop(variable, None)
    apply_binding(rank.binding)
    prepare_for_requests(job.trains)
    sys.stderr.flush()
    os.execvpe(rank.argv[0], rank.argv, rank.env)


def _report_error(error: ValueError, env: Mapping[str, str], options: Options) -> int:
    """Print an error, by one rank if all find it, and end the job step; return the exit code."""
    shared = isinstance(error, SharedError)
    if shared and not is_first_rank(env):
        return EXIT_USAGE
    others = (options.nnodes or 1) > 1 or any(env.get(starter.rank) for starter in STARTERS)
    where = f" on {socket.gethostname()}" if others and not shared else ""
    say(f"error{where}: {error}")
    if not options.dry_run:
        _end_step(env)
    return EXIT_USAGE


def _end_step(env: Mapping[str, str]) -> None:
    """End the ranks on all nodes of an srun, which would let them wait for the one that died."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    alone = env.get("SLURM_STEP_NUM_TASKS") in (None, "1")
    if step and "SLURM_JOB_ID" in env and not alone and shutil.which("scancel"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # keep the rank's own exit code
        words = ["scancel", "--signal=TERM", f"{env['SLURM_JOB_ID']}.{step}"]
        subprocess.run(words, timeout=30, check=False)


def _run(job: Job, env: Mapping[str, str], options: Options, words: Sequence[str]) -> int:
    """Run the ranks of ``words``, and again each time they leave with more experts."""
    if job.placement.adopted and not job.is_of_a_step:
        _exec_rank(job)
    requested, starts = False, 0
    reported = Path(tempfile.gettempdir(), f"fairseq_tutel_{secrets.token_hex(8)}")
    while True:
        # Hydra builds the model with the experts of its config, whatever the set has by now
        for rank in job.ranks if job.trains and job.command.kind != "hydra" else ():
            rank.env[RESTARTS] = "1"
        for rank in job.ranks if len(job.ranks) > 1 else ():
            rank.env[REPORTED] = str(reported)
        supervisor = Supervisor(job.ranks, options.grace_seconds, job.trains, requested)
        status, requested = supervisor.run(), supervisor.requested
        shutil.rmtree(reported, ignore_errors=True)
        if status != EXIT_GROWN or not job.trains or supervisor.stopped_by is not None:
            break
        say("the set has more experts: starting the ranks again")
        job = prepare_job(options, parse_command(restarted(words), env.get("PATH")), env)
        starts += 1
        _compare(job, job.report(again=True), options, starts)
    left = status in (0, EXIT_REQUEUE)
    if job.is_of_a_step and not left and supervisor.stopped_by is None:
        _end_step(env)
    return status


def _compare(job: Job, report: Mapping[str, Any] | None, options: Options, starts: int = 0) -> None:
    """Wait for the job's other launchers; ValueError if they do not fit, or do not report."""
    seconds = options.agree_seconds
    if seconds is None or starts and not seconds:
        # a scheduler may give nodes to a job one by one, but later all launchers are there
        seconds = 60 if starts else 300
    if report is not None and seconds:
        shared = job.ranks[0].env
        address, port = shared["MASTER_ADDR"], int(shared["MASTER_PORT"])
        compare_nodes(report, address, port, seconds, starts)


def main(argv: Sequence[str]) -> int:
    """Run the launcher; return the exit code, 2 for an error in the options."""
    args = vars(build_parser().parse_args(argv))
    env, words = dict(os.environ), args.pop("command")
    words = words[words[:1] == ["--"] :]
    options = Options(**args)
    try:
        command = parse_command(words, env.get("PATH"))
        job = prepare_job(options, command, env)
        for line in job.summary.splitlines() if job.placement.rank == 0 else ():
            say(line)
        for rank in job.ranks if options.dry_run else ():
            new = {k: v for k, v in rank.env.items() if env.get(k) != v}
            settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(new.items()))
            sys.stdout.write(f"{settings} {shlex.join(rank.argv)}\n")
        if options.dry_run:
            return 0
        _compare(job, job.report(), options)
        return _run(job, env, options, words)
    except ValueError as error:
        return _report_error(error, env, options)
