"""Which errors a fairseq program reports in one line."""

import argparse
import signal
import sys
import traceback

import pytest
from omegaconf import OmegaConf

from fairseq_tutel.checkpoint import AllRanks, CheckpointError
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.integrations.fairseq.errors import excepthook
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoEConfig


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
    assert excepthook.explain(refusal, refusal.__traceback__) == str(refusal)
    for other in (
        _caught(lambda: int("x")),  # raised elsewhere
        _caught(lambda: MoEConfig(num_experts=4, unknown=1)),  # a TypeError: a bug
    ):
        assert excepthook.explain(other, other.__traceback__) is None
    assert excepthook.explain(ValueError("no traceback"), None) is None


@pytest.mark.parametrize("name", ["moe_router", "moe_exchange", "moe_expert_network"])
def test_a_name_of_ones_own_that_a_checkpoint_has_brings_how_it_becomes_known(name):
    config = OmegaConf.structured(TransformerLMGPTMoEConfig)
    error = _caught(lambda: setattr(config, name, "mine"))
    line = excepthook.explain(error, error.__traceback__)
    assert line.startswith(f"{name}: Invalid value 'mine'") and "--user-dir my_plugin" in line


def test_what_another_error_caused_keeps_its_traceback():
    """A bug in a step that ranks take together is not the user's error."""

    def fail():
        AllRanks(0, 1, None).run_on_all_ranks("saving", lambda: None.attribute)

    error = _caught(fail)
    assert isinstance(error, CheckpointError)
    assert excepthook.explain(error, error.__traceback__) is None


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
        tell, error = sys.excepthook, RuntimeError("Connection closed by peer")

        def _distributed_excepthook(*error):
            """torch's; in it the signal arrives that came while the rank waited for the other."""
            signal.raise_signal(signal.SIGINT)
            tell(*error)

        monkeypatch.setattr(sys, "excepthook", _distributed_excepthook)
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == line
