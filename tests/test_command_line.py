"""What the package's own commands share."""

import logging
import subprocess
import sys
import warnings

import pytest

from fairseq_tutel.command_line import quiet, run_and_exit

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


def test_the_commands_import_fairseq_without_its_noise(caplog, monkeypatch):
    noise = "`torch.jit.script` is deprecated.", "Please install tensorboardX: pip install"

    def main():
        for text in (noise[0], "another warning"):
            warnings.warn(text, FutureWarning, stacklevel=1)
        for text in (noise[1], "another line"):
            logging.getLogger("fairseq.tasks.text_to_speech").warning(text)
        return 0

    for everything in (False, True):
        monkeypatch.setenv(quiet.VARIABLE, str(int(everything)))
        with warnings.catch_warnings(record=True) as seen, pytest.raises(SystemExit, match="0"):
            warnings.simplefilter("always")
            run_and_exit(main)
        said = {str(warning.message) for warning in seen} | set(caplog.messages)
        assert said == {"another warning", "another line"} | (set(noise) if everything else set())
        for each in list(logging.getLogger("fairseq.tasks.text_to_speech").filters):
            logging.getLogger("fairseq.tasks.text_to_speech").removeFilter(each)
