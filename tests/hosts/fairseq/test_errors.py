"""Which errors a fairseq program reports in one line."""

import argparse
import signal
import sys
import traceback

import pytest

from fairseq_tutel.checkpoint import AllRanks, CheckpointError
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.hosts.fairseq import excepthook, user_errors


@pytest.fixture
def process(monkeypatch):
    """What the hooks change is put back."""
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
    excepthook._interrupted = False


def _caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("did not raise")


def test_refusals_of_this_package_and_nothing_else():
    refusal = _caught(lambda: MoEConfig(num_experts=4, top_k=9))
    assert excepthook.is_user_error(refusal, refusal.__traceback__)
    for other in (
        _caught(lambda: int("x")),  # raised elsewhere
        _caught(lambda: MoEConfig(num_experts=4, unknown=1)),  # a TypeError: a bug
    ):
        assert not excepthook.is_user_error(other, other.__traceback__)
    assert not excepthook.is_user_error(ValueError("no traceback"), None)


def test_what_another_error_caused_keeps_its_traceback():
    """A bug in a step that ranks take together is not the user's error."""

    def fail():
        AllRanks(0, 1, None).together("saving", lambda: None.attribute)

    error = _caught(fail)
    assert isinstance(error, CheckpointError)
    assert not excepthook.is_user_error(error, error.__traceback__)


@pytest.mark.parametrize("wanted, reported", [("0", True), ("1", False)])
def test_the_hook(wanted, reported, process, monkeypatch, capsys):
    monkeypatch.setenv("FAIRSEQ_TUTEL_TRACEBACK", wanted)
    monkeypatch.setattr(sys, "argv", ["/somewhere/fairseq-train"])
    passed_on = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: passed_on.append(args))
    excepthook.install()
    refusal = _caught(lambda: MoEConfig(num_experts=4, top_k=9))
    sys.excepthook(type(refusal), refusal, refusal.__traceback__)
    line = capsys.readouterr().err
    assert bool(passed_on) != reported
    if reported:
        assert line.startswith("fairseq-train: error: ") and line.count("\n") == 1
        assert str(refusal) in line


def test_the_error_that_hydra_1_0_fails_to_print(monkeypatch, capsys):
    """Its report of a job's error is a TypeError on Python 3.10."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/fairseq-hydra-train"])
    passed_on = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: passed_on.append(args))
    excepthook.install()

    def report(function):
        try:
            function()
        except Exception as error:
            traceback.print_exception(etype=None, value=error, tb=None)

    error = _caught(lambda: report(lambda: MoEConfig(num_experts=4, top_k=9)))
    assert isinstance(error, TypeError)
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.startswith("fairseq-hydra-train: error: top_k")
    other = _caught(lambda: report(lambda: int("x")))
    sys.excepthook(type(other), other, other.__traceback__)
    assert [kind for kind, *_ in passed_on] == [ValueError]


def test_other_programs_keep_their_hook(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    before = sys.excepthook
    excepthook.install()
    assert sys.excepthook is before


def _fails_in_hook(monkeypatch):
    """torch's hook, in which the signal arrives that came while the rank waited for the other."""

    def _distributed_excepthook(*error):
        signal.raise_signal(signal.SIGINT)
        tell(*error)

    tell = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", _distributed_excepthook)
    return RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("rank, line", [("0", "fairseq-train: interrupted\n"), ("1", "")])
@pytest.mark.parametrize("how", ["in Python", "while another rank's end is reported"])
def test_ctrl_c_is_reported_once_in_one_line(how, rank, line, process, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["/somewhere/fairseq-train"])
    monkeypatch.setattr(sys, "excepthook", lambda *args: pytest.fail("a traceback"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    excepthook.install()
    if how == "in Python":
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        error = caught.value
    else:
        error = _fails_in_hook(monkeypatch)
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == line


def test_what_an_error_of_fairseqs_own_kind_says_elsewhere_keeps_its_traceback():
    """A KeyError is a user's error where fairseq looks a name up, and a bug elsewhere."""

    def validate(stats):
        stats["nosuch"]

    def somewhere_else(stats):
        validate_deeper(stats)

    def validate_deeper(stats):
        stats["nosuch"]

    error = _caught(lambda: validate({"loss": 1}))
    line = user_errors.explain(error, error.__traceback__)
    assert line == "--best-checkpoint-metric nosuch: none of validation's metrics, loss"
    error = _caught(lambda: somewhere_else({"loss": 1}))
    assert user_errors.explain(error, error.__traceback__) is None
