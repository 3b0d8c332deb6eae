"""What importing the layer costs a program that has torch already."""

import subprocess
import sys

# seconds of the processor; what else runs on the machine must not decide
PROGRAM = """
import sys, time, torch
before = "torch._dynamo" in sys.modules
begin = time.process_time()
import fairseq_tutel.moe
print(time.process_time() - begin, before, "torch._dynamo" in sys.modules, "triton" in sys.modules)
"""


def test_it_is_cheap_and_imports_no_tracer():
    seconds = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        took, before, after, triton = run.stdout.split()
        seconds.append(float(took))
        assert before == after and triton == "False"
    assert min(seconds) < 0.6  # 0.2 on the machine that this was written on
