"""What importing the package and the layer costs a program that has torch already."""

import subprocess
import sys

import fairseq_tutel

PROGRAM = """
import sys
import fairseq_tutel
assert "torch" not in sys.modules and "fairseq_tutel.moe" not in sys.modules
assert {"MoELayer", "replace_ffn", "register"} <= set(dir(fairseq_tutel))
import torch
before = set(sys.modules)
from fairseq_tutel import MoELayer, replace_ffn
import fairseq_tutel.moe as moe
assert MoELayer is moe.MoELayer and replace_ffn is moe.replace_ffn
new = set(sys.modules) - before
rooms = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
assert rooms == {"fairseq_tutel"}, sorted(new)
assert not hasattr(fairseq_tutel, "MoELayers")
layer, x = MoELayer(16, 4, 32), torch.randn(8, 16)
layer(x)
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    layer(x)
assert counter.get_total_flops() > 4 * 8 * 16 * 32
"""


def test_it_offers_the_layer_and_imports_no_other_library():
    """Neither Triton nor a part of torch that a program does without, as its tracer."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert set(fairseq_tutel.__all__) <= set(dir(fairseq_tutel))
