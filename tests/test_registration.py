"""What an import costs and changes, when the package registers, and where its configs are."""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from helpers.commands import ROOT, run

from fairseq_tutel.__main__ import main
from fairseq_tutel.command_line import CONFIGS, config_directory

ALONE = """
import logging, sys
factory, hook = logging.getLogRecordFactory(), sys.excepthook
import fairseq_tutel
assert "torch" not in sys.modules and "fairseq_tutel.moe" not in sys.modules
assert {"MoELayer", "replace_ffn", "register"} <= set(dir(fairseq_tutel))
assert set(fairseq_tutel.__all__) <= set(dir(fairseq_tutel))
import torch
before = set(sys.modules)
from fairseq_tutel import MoELayer, replace_ffn
import fairseq_tutel.moe as moe
assert MoELayer is moe.MoELayer and replace_ffn is moe.replace_ffn
new = set(sys.modules) - before
rooms = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
assert rooms == {"fairseq_tutel"}, sorted(new)  # nor Triton, nor torch's tracer
assert not hasattr(fairseq_tutel, "MoELayers")
layer, x = MoELayer(16, 4, 32), torch.randn(8, 16)
layer(x)
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    layer(x)
assert counter.get_total_flops() > 4 * 8 * 16 * 32
assert (factory, hook) == (logging.getLogRecordFactory(), sys.excepthook)
"""
IN_FAIRSEQ = """
from fairseq import models
from fairseq.trainer import Trainer
import fairseq_tutel.integrations.fairseq.models
assert "transformer_lm_gpt_moe" not in models.MODEL_REGISTRY
assert Trainer.__new__ is object.__new__ and hook is sys.excepthook
fairseq_tutel.register()
assert "transformer_lm_gpt_moe" in models.MODEL_REGISTRY
assert Trainer.__new__ is not object.__new__
"""


def test_imports_change_nothing_and_a_call_registers():
    """Run a process of its own: here, the tests themselves have registered already."""
    run([sys.executable, "-c", ALONE + (IN_FAIRSEQ if find_spec("fairseq") else "")])


def test_configs_are_found_from_anywhere_and_a_changed_copy_goes_first(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    assert capsys.readouterr().out == f"{CONFIGS}\n"
    (tmp_path / "configs").mkdir()
    assert config_directory("tiny_cpu.yaml") == CONFIGS  # a folder of that name, without the file
    (tmp_path / "configs" / "tiny_cpu.yaml").write_text("")
    assert config_directory("tiny_cpu.yaml") == Path("configs")
    assert main(["confgs"]) == 2 and "confgs" in capsys.readouterr().err


def test_the_package_that_pip_installs_holds_configs_and_the_mark_of_types(tmp_path):
    """A wheel is a zip file; building it without isolation takes seconds and no network."""
    build = ["wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(ROOT)]
    run([sys.executable, "-m", "pip", *build])
    (wheel,) = tmp_path.glob("fairseq_tutel-*.whl")
    names = {"py.typed", "configs/meta_1.1t.yaml", "configs/hardware/h100.yaml", "moe/layer.py"}
    assert {f"fairseq_tutel/{name}" for name in names} <= set(zipfile.ZipFile(wheel).namelist())
