"""What importing the layer costs a program that has torch already."""

import subprocess
import sys

PROGRAM = """
import sys, torch
before = set(sys.modules)
import fairseq_tutel.moe
new = set(sys.modules) - before
rooms = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
assert rooms == {"fairseq_tutel"}, sorted(new)
"""


def test_it_imports_no_other_library():
    """Neither Triton nor a part of torch that a program does without, as its tracer."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
