"""Run a function on several ranks connected by gloo; the call always ends.

Ranks are forked from one process that has imported everything once (preloaded.py), which takes
a tenth of a second, and meet through a file, so that no port can be taken. A rank that raises or
hangs ends the call; the error shows where each rank was.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fairseq_tutel

from . import fake_gpu
from .seeds import seed_all

# Seconds that the other ranks get to fail too, once one has failed.
GRACE = 3.0
_FOLDERS = [str(pathlib.Path(__file__).resolve().parents[n]) for n in (2, 1)]
_PRELOAD = ["torch", "pytest", "helpers.preloaded"]


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message holds what each has to say."""


def run_ranks(function: Callable, world_size: int, *args, timeout: float = 60.0) -> list[Any]:
    """Run ``function(*args)`` on each rank; alone, a rank has no process group.

    All ranks draw the same random numbers, by the seed of this process.

    Returns:
        Results by rank, pickled for each.

    Raises:
        RanksFailed: also after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # of the fork server, if it starts now; Python 3.11 gives it no other path
    path = os.pathsep.join(filter(None, [*_FOLDERS, os.environ.get("PYTHONPATH")]))
    of_server = mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    with of_server, tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = pathlib.Path(name)
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, args, rank, world_size, name, timeout, torch.initial_seed()),
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, time.monotonic() + timeout)
        finally:
            _end(processes)
        if any(process.exitcode != 0 for process in processes):
            raise RanksFailed("\n".join(_story(folder, r, p) for r, p in enumerate(processes)))
        return [
            torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(world_size)
        ]


def on_ranks(ranks: int | None = None, timeout: float = 60.0):
    """Every rank runs the body of this test; as many as its argument ``world_size`` by default."""

    def decorate(body):
        @functools.wraps(body)
        def test(**arguments):
            world_size = ranks or arguments["world_size"]
            call = body.__module__, body.__name__, arguments
            run_ranks(_run_body, world_size, *call, timeout=timeout)

        return test

    return decorate


def _run_body(module, name, arguments):
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def _join(processes, deadline):
    """Wait until all have ended, the deadline, or a little after the first failure."""
    running = list(processes)
    while running and time.monotonic() < deadline:
        wait([p.sentinel for p in running], timeout=max(deadline - time.monotonic(), 0))
        ended = [p for p in running if not p.is_alive()]
        running = [p for p in running if p not in ended]
        if any(p.exitcode != 0 for p in ended):
            deadline = min(deadline, time.monotonic() + GRACE)


def _end(processes):
    """Ask those that still run where they are, then kill them."""
    running = [p for p in processes if p.is_alive()]
    for process in running:
        os.kill(process.pid, signal.SIGUSR2)
    if running:
        time.sleep(0.3)
    for process in processes:
        if process.is_alive():
            process.kill()
        if process.pid is not None:
            process.join()


def _story(folder, rank, process):
    error, stacks = folder / f"error-{rank}", folder / f"stacks-{rank}"
    if error.exists():
        text = error.read_text()
    elif process.exitcode == 0:
        text = "ended well"
    else:
        hung = stacks.read_text() if stacks.exists() else ""
        text = f"exit code {process.exitcode} without an exception; hung at:\n{hung}"
    return f"--- rank {rank}: {text}"


def _rank_main(function, args, rank, world_size, folder, timeout, seed):
    torch.set_num_threads(1)
    seed_all(seed)
    fake_gpu.install()
    folder = pathlib.Path(folder)
    with open(folder / f"stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)
        try:
            if "fairseq.utils" in sys.modules:
                fairseq_tutel.register()
            if world_size > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/rendezvous",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=2 * timeout),
                )
            result = function(*args)
            torch.save(result, folder / f"result-{rank}")
            if world_size > 1:
                dist.barrier()  # nobody leaves while others still talk
                dist.destroy_process_group()
        except BaseException:
            (folder / f"error-{rank}").write_text(traceback.format_exc())
            os._exit(1)
