"""Command line of the launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ..command_line import CommandLine
from ..exit_codes import EXIT_REQUEUE, EXIT_USAGE
from ..ranges import at_least, in_range
from .binding import apply_binding
from .fairseq_commands import parse_command
from .job import Job, Options, prepare_job
from .preflight import compare_nodes
from .shared_errors import message
from .supervise import Supervisor, prepare_for_requests

_DESCRIPTION = """\
Starts the ranks of COMMAND on this machine, or adopts the rank that torchrun, srun or mpirun
has started, binds each rank to the cores and memory next to its GPU, and adds the options that
fairseq needs to form one job of them. COMMAND is fairseq-train, fairseq-hydra-train,
fairseq-eval-lm, fairseq-validate, fairseq-generate, fairseq-interactive, or any other program,
which finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.
"""
_EPILOG = f"""\
Options of COMMAND win over what the launcher would add; where they cannot both hold, it stops
and names both. Variables that are already set win, too (but for torchrun's OMP_NUM_THREADS=1).
Ranks on the CPU get THP_MEM_ALLOC_ENABLE=1: torch then asks for huge pages for big tensors. Every
rank finds how it was bound in FAIRSEQ_TUTEL_BIND, and the NCCL profile's name in
FAIRSEQ_TUTEL_NCCL_PROFILE. The exit code is that of the rank that
failed first ({EXIT_REQUEUE}: the ranks saved a checkpoint on SIGUSR1 and want to be queued again).
"""


def _nproc(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor auto")
    return int(text)


_POSITIVE, _NATURAL = in_range(int, at_least(1)), in_range(int, at_least(0))


class _CommandLine(CommandLine):
    """Names the ``--`` without which options of COMMAND are taken for the launcher's."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; options of COMMAND go behind it: [options] -- COMMAND [ARGUMENT ...]"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The launcher's own options; what follows ``--`` is the command of the ranks."""
    parser = _CommandLine(
        prog="python -m fairseq_tutel.launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    _add_ranks(parser.add_argument)
    _add_environment(parser.add_argument)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_ranks(add: Callable[..., argparse.Action]) -> None:
    """Which ranks there are, and where they meet."""
    add(
        "--nproc-per-node",
        type=_nproc,
        default=None,
        metavar="N|auto",
        help="ranks to start on this node; auto: COMMAND's own world size if it gives one, else "
        "one per visible GPU, else 1 (default: auto)",
    )
    add(
        "--nnodes",
        type=_POSITIVE,
        metavar="N",
        help="nodes of the job, each running this launcher (default: as srun or mpirun have it, "
        "or 1)",
    )
    add(
        "--node-rank",
        type=_NATURAL,
        metavar="I",
        help="this node's number from 0 on, with --nnodes",
    )
    add(
        "--master-addr",
        metavar="HOST",
        help="host of rank 0 (default: MASTER_ADDR, or the first of SLURM's node list, or this "
        "machine if the job has one node)",
    )
    add(
        "--master-port",
        type=_POSITIVE,
        metavar="PORT",
        help="port on that host (default: MASTER_PORT, or a free one, or one derived from the "
        "job's id)",
    )


def _add_environment(add: Callable[..., argparse.Action]) -> None:
    """How the ranks of this node run, and how they end."""
    add(
        "--bind",
        default="auto",
        metavar="auto|none|SETS",
        help="auto: each rank gets its share of the cores of its GPU's NUMA node, and that node's "
        "memory; without a GPU, slices of the cores this process may use. none: bind nothing. "
        "SETS: the cores of each local rank, as 0-3,4-7 or 0-3,16-19:4-7,20-23 or 0xff,0xff00 "
        "(default: auto)",
    )
    add(
        "--nccl-profile",
        default="none",
        metavar="NAME[,sl=N][,tc=N][,gid=N][,qps=N]|zero-sm",
        help="ib-adaptive-routing: let the switches of an InfiniBand or RoCE fabric choose each "
        "packet's path (NCCL_IB_ADAPTIVE_ROUTING=1), on service level sl (NCCL_IB_SL), which "
        "the site must name, or traffic class tc (NCCL_IB_TC), with the RoCE address gid "
        "(NCCL_IB_GID_INDEX) and qps queue pairs per connection (NCCL_IB_QPS_PER_CONNECTION); "
        "zero-sm: copy engines in place of multiprocessors where NCCL has that (2.28 or newer), "
        "for overlapped exchanges; none: set nothing (default: none)",
    )
    add(
        "--output",
        default="prefix",
        choices=["prefix", "plain"],
        help="prefix: lines of ranks above 0 begin with [rank N], and what they say of fairseq's "
        "start as rank 0 does (INFO) is left out; plain: output is left as it is (default: prefix)",
    )
    add(
        "--grace-seconds",
        type=in_range(float, at_least(0)),
        default=15.0,
        metavar="S",
        help="time between SIGTERM and SIGKILL for the other ranks when one has failed "
        "(default: 15)",
    )
    add(
        "--agree-seconds",
        type=_NATURAL,
        default=300,
        metavar="S",
        help="the launchers of several nodes compare their ranks at MASTER_ADDR:MASTER_PORT before "
        "they start them, and wait that long for each other; 0: do not compare (default: 300)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the ranks' commands and the binding, and start nothing",
    )


def _print_summary(job: Job) -> None:
    if job.placement.rank == 0:
        sys.stderr.write("".join(f"launch: {line}\n" for line in job.summary.splitlines()))
        sys.stderr.flush()


def _print_commands(job: Job, env: Mapping[str, str]) -> None:
    for rank in job.ranks:
        new = {k: v for k, v in rank.env.items() if env.get(k) != v}
        settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(new.items()))
        sys.stdout.write(f"{settings} {shlex.join(rank.argv)}\n")


def _exec_rank(job: Job) -> None:
    """Turns this process into its rank, so that no launcher stands between it and its signals."""
    rank = job.ranks[0]
    apply_binding(rank.binding)
    prepare_for_requests(job.early_request)
    sys.stderr.flush()
    os.execvpe(rank.argv[0], rank.argv, rank.env)


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process with others, and can be asked to end them."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    several = env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return bool(step and env.get("SLURM_JOB_ID") and several) and bool(shutil.which("scancel"))


def _report_error(
    error: ValueError, env: Mapping[str, str], options: Options, dry_run: bool
) -> int:
    """Prints what is wrong, and ends the job step so that no other node waits for this one."""
    text = message(error, env, (options.nnodes or 1) > 1)
    sys.stderr.write(text)
    sys.stderr.flush()
    if text and not dry_run and _is_in_step(env):
        _end_step(env)
    return EXIT_USAGE


def _end_step(env: Mapping[str, str]) -> None:
    """Ends the ranks on all nodes: srun by itself would let them wait for the one that died."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # keep the rank's own exit code
    step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID') or env['SLURM_STEPID']}"
    subprocess.run(["scancel", "--signal=TERM", step], timeout=30, check=False)


def _run(job: Job, env: Mapping[str, str], grace: float) -> int:
    spans_nodes_by_srun = (
        job.placement.source == "srun"
        and job.placement.world_size > len(job.ranks)
        and shutil.which("scancel") is not None
    )
    if job.placement.adopted and not spans_nodes_by_srun:
        _exec_rank(job)
    supervisor = Supervisor(job.ranks, grace, job.early_request)
    status = supervisor.run()
    if spans_nodes_by_srun and status not in (0, EXIT_REQUEUE) and supervisor.stopped_by is None:
        _end_step(env)
    return status


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; 2 for an error in the options or their combination."""
    args = build_parser().parse_args(argv)
    env = dict(os.environ)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    options = Options(
        nproc_per_node=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        bind=args.bind,
        nccl_profile=args.nccl_profile,
        prefix_output=args.output == "prefix",
    )
    try:
        job = prepare_job(options, parse_command(words, env.get("PATH")), env)
        _print_summary(job)
        if args.dry_run:
            _print_commands(job, env)
            return 0
        if job.report is not None and args.agree_seconds:
            shared = job.ranks[0].env
            compare_nodes(
                job.report, shared["MASTER_ADDR"], int(shared["MASTER_PORT"]), args.agree_seconds
            )
    except ValueError as error:
        return _report_error(error, env, options, args.dry_run)
    return _run(job, env, args.grace_seconds)
