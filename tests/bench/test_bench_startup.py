"""bench_startup: what its clock measures, and that its commands are fairseq's."""

import shlex
import sys
import time
from pathlib import Path

import pytest
from bench_startup import pairs, seconds_of
from fairseq import options


def test_the_clock_ends_with_a_line_of_the_log_or_with_the_command():
    program = "import time; time.sleep(.2); print('num_updates=1,', flush=True); time.sleep(.6)"
    command = shlex.join([sys.executable, "-c", program])
    begin = time.perf_counter()
    first = seconds_of(command, "num_updates=1,")
    whole = time.perf_counter() - begin
    assert 0.2 < first < whole - 0.5
    assert seconds_of(command) > 0.8
    for failing, until in ((f"{sys.executable} -c 'import no_such'", None), (command, "nothing")):
        with pytest.raises(ValueError, match=r"(?s) failed:\n.*(no_such|num_updates=1)"):
            seconds_of(failing, until)


def test_both_models_are_the_same_but_for_experts():
    pair = pairs(Path("data"))["fairseq-train until the first update"]
    found = []
    for command in (pair.with_experts, pair.without):
        parser = options.get_training_parser()
        found.append(vars(options.parse_args_and_arch(parser, shlex.split(command)[1:])))
    experts, dense = found
    differing = {name for name in dense if dense[name] != experts.get(name, dense[name])}
    assert differing == {"arch", "criterion", "user_dir"}
