"""Programs that import tutel, unmodified."""

import importlib
import sys
from types import ModuleType

import pytest

from fairseq_tutel.integrations import tutel
from fairseq_tutel.integrations.tutel import __main__ as command

PROGRAM = """
import sys
import torch
import beside
from tutel import moe, system
from tutel.net import simple_all_reduce

layer = moe.moe_layer({"type": "top", "k": 2}, 4, {"type": "ffn", "hidden_size_per_expert": 8})
beside.found.append(([*sys.argv], __name__, layer(torch.ones(3, 4)).shape))
"""


@pytest.fixture(autouse=True)
def no_tutel(monkeypatch):
    """Nothing is left of an installed module."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ["tutel", "beside", *(f"tutel.{name}" for name in ("moe", "net", "system"))]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", [["{folder}/of_tutel.py"], ["-m", "of_tutel"]])
def test_a_program_runs_as_it_is(tmp_path, monkeypatch, words):
    (tmp_path / "of_tutel.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("found = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = [word.format(folder=tmp_path) for word in words]
    monkeypatch.setattr(sys, "argv", ["command", *words, "--flag", "1"])
    command.main()
    ((arguments, name, shape),) = sys.modules["beside"].found
    assert (arguments[1:], name, shape) == (["--flag", "1"], "__main__", (3, 4))
    assert str(tmp_path / "of_tutel.py") == arguments[0]


def test_tutel_itself_is_not_replaced_unless_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", ModuleType("tutel"))
    with pytest.raises(ImportError, match="Tutel is installed"):
        tutel.install()
    tutel.install(force=True)
    tutel.install()  # a second time changes nothing
    assert importlib.import_module("tutel.moe") is sys.modules["tutel"].moe is tutel.moe
    with pytest.raises(ImportError, match="tutel.jit is not offered, only moe, net, system"):
        exec("from tutel import jit")


def test_usage(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit, match="usage: python -m fairseq_tutel.integrations.tutel"):
        command.main()
