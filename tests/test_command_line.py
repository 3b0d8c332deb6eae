"""What the package's own commands share."""

import subprocess
import sys

PROGRAM = """
from fairseq_tutel.command_line import run_and_exit

def main():
    for number in range(100_000):
        print(number)
    return 0

run_and_exit(main)
"""


def test_a_reader_that_has_ended_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()  # as head does
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""
