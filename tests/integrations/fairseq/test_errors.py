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
    """Function (program) that installs the hook; returns what other hooks get. It is put back."""
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    before, passed_on = signal.getsignal(signal.SIGINT), []

    def install(program):
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{program}"])
        monkeypatch.setattr(sys, "excepthook", lambda *args: passed_on.append(args))
        excepthook.install()
        return passed_on

    yield install
    signal.signal(signal.SIGINT, before)
    excepthook._interrupted = False


def _tell(error):
    sys.excepthook(type(error), error, error.__traceback__)


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
    passed_on = process("fairseq-train")
    refusal = _caught(lambda: MoEConfig(num_experts=4, top_k=9))
    _tell(refusal)
    assert bool(passed_on) != reported
    line = capsys.readouterr().err
    assert line.startswith(f"fairseq-train: error: {refusal} [") == reported
    assert line.count("\n") == reported


def test_the_error_that_hydra_1_0_fails_to_print(process, capsys):
    """Its report of a job's error is a TypeError on Python 3.10."""
    passed_on = process("fairseq-hydra-train")

    def report(function):
        try:
            function()
        except Exception as error:
            traceback.print_exception(etype=None, value=error, tb=None)

    error = _caught(lambda: report(lambda: MoEConfig(num_experts=4, top_k=9)))
    assert isinstance(error, TypeError)
    _tell(error)
    assert capsys.readouterr().err.startswith("fairseq-hydra-train: error: top_k")
    _tell(_caught(lambda: report(lambda: int("x"))))
    assert [kind for kind, *_ in passed_on] == [ValueError]


@pytest.mark.parametrize("rank, line", [("0", "fairseq-train: interrupted\n"), ("1", "")])
@pytest.mark.parametrize("how", ["in Python", "while another rank's end is reported"])
def test_ctrl_c_is_reported_once_in_one_line(how, rank, line, process, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    passed_on = process("fairseq-train")
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
    _tell(error)
    assert capsys.readouterr().err == line and not passed_on  # no traceback
