"""Settings that must precede every import: without a GPU, Triton interprets kernels."""

import logging
import os
import sys
from collections import Counter

import pytest
import torch
from helpers import fake_gpu
from helpers.commands import free_port
from helpers.seeds import seed_all

import fairseq_tutel
from fairseq_tutel import ops
from fairseq_tutel.ops import backend as chooser

HAS_GPU = fake_gpu.install()
# Triton reads this when it is imported; set later, parts of its language fail.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


LEFT_OUT = pytest.StashKey[Counter]()


def pytest_collection_modifyitems(config, items):
    """Deselect what cannot run here; register if a collected test imports fairseq."""
    if "fairseq.utils" in sys.modules:
        fairseq_tutel.register()
    reasons = {
        "gpu": None if HAS_GPU else "no GPU",
        "multi_gpu": None if torch.cuda.device_count() > 1 else "fewer than two GPUs",
        "interpreted": chooser._why_not_triton("cpu"),
    }
    reasons = {kind: reason for kind, reason in reasons.items() if reason}
    left_out = {}
    for item in items:
        for kind in filter(item.get_closest_marker, reasons):
            left_out[item] = reasons[kind]
    items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] = Counter(left_out.values())
    config.hook.pytest_deselected(items=list(left_out))


def pytest_sessionfinish(session, exitstatus):
    """Hand the counts of a process of pytest-xdist to the one that started it."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(
        LEFT_OUT, None
    ):
        session.exitstatus = pytest.ExitCode.OK  # tests were chosen, and none can run here
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keep the counts; each process of pytest-xdist collects all tests."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Say in one line how many tests cannot run here."""
    if counts := config.stash.get(LEFT_OUT, None):
        listed = ", ".join(f"{count} ({why})" for why, count in counts.items())
        terminalreporter.write_line(f"cannot run here: {listed}")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """Seed a fixture by its own name: one of a module depends on no test that ran before."""
    seed_all(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Seed a test by its own name, also when it runs alone or behind others."""
    seed_all(item.nodeid)


@pytest.fixture(autouse=True)
def log_levels():
    """What other tests, or fixtures of their modules, set for a trainer does not reach this one."""
    for name in ("fairseq", "fairseq_tutel"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def backend():
    """Sets the operators' backend; undone afterwards."""
    before = ops.get_backend()
    yield ops.set_backend
    ops.set_backend(before)


@pytest.fixture
def port():
    """One that is free."""
    return free_port()


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Runs command lines in processes forked from one (helpers/programs.py)."""
    from helpers.programs import Programs

    with Programs(tmp_path_factory.mktemp("programs")) as server:
        yield server
