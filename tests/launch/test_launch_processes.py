"""Ranks as real processes: exit codes, signals, output, and adoption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import (
    LAUNCH,
    LAUNCHER_ALONE,
    ended,
    environment,
    executable,
    is_alive,
    launch,
    pids_in,
    script_words,
    start,
    wait_for,
)

from fairseq_tutel.command_line import EXIT_GROWN


def test_ranks_find_their_place():
    words = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS"
    env = environment()
    env.pop("OMP_NUM_THREADS", None)
    result = launch(*script_words(words), env=env)
    assert result.returncode == 0, result.stderr
    first, second = sorted(result.stdout.splitlines())
    address, threads = first.split()[3:]
    assert address.startswith("127.0.0.1:") and int(threads) >= 1
    assert first == f"0 0 2 {address} {threads}"
    assert second == f"[rank 1] 1 1 2 {address} {threads}"
    assert "2 ranks on 1 node (started by launcher), gloo on the CPU" in result.stderr


def test_plain_output_and_standard_input_of_rank_0():
    result = launch("--nproc-per-node", "2", "--output", "plain", "--", "cat", input="a line\n")
    assert (result.returncode, result.stdout) == (0, "a line\n")


def test_the_folder_of_reported_errors_is_the_launchers_own_and_removed(tmp_path):
    script = f"mkdir -p $FAIRSEQ_TUTEL_REPORTED; echo $FAIRSEQ_TUTEL_REPORTED > {tmp_path}/$RANK"
    assert launch(*script_words(script)).returncode == 0
    folder = (tmp_path / "0").read_text().strip()
    assert folder == (tmp_path / "1").read_text().strip() and not Path(folder).exists()


# What the imports of fairseq print, and what is somebody else's.
_NOISE = f"""#!{sys.executable}
import logging, warnings
logging.basicConfig(level=logging.INFO)
warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", FutureWarning)
log = logging.getLogger("fairseq.tasks.text_to_speech")
log.info("Please install tensorboardX: pip install tensorboardX")
log.info("a line of the task")
warnings.warn("a warning of the user's", FutureWarning)
"""


@pytest.mark.parametrize("everything", ["0", "1"])
def test_ranks_import_fairseq_without_noise_of_others(tmp_path, everything):
    program = executable(tmp_path / "fairseq-train", _NOISE)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('the own start\\n')")
    env = environment(FAIRSEQ_TUTEL_WARNINGS=everything)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    result = launch("--nproc-per-node", "2", "--", program, env=env)
    assert result.returncode == 0, result.stderr
    for line in ("a line of the task", "a warning of the user's", "the own start"):
        assert len([each for each in result.stderr.splitlines() if line in each]) >= 2, line
    for noise in ("torch.jit", "tensorboardX"):
        assert (noise in result.stderr) == (everything == "1")


# Writes like Python to a pipe: blocks of a buffer, which end anywhere.
_BLOCKS = f"""#!{sys.executable} -S
import os
rank = os.environ["RANK"]
for line in range(2000):
    print(f"H-{{rank}}-{{line}}", "x" * (line % 97))
print("the last line without an end", end="")
"""


@pytest.mark.parametrize("output", ["prefix", "plain"])
def test_lines_of_several_ranks_on_one_pipe_come_whole(tmp_path, output):
    program = executable(tmp_path / "fairseq-generate", _BLOCKS)
    result = launch("--nproc-per-node", "2", "--output", output, "--", program)
    assert result.returncode == 0, result.stderr
    wanted = [f"H-{rank}-{line} {'x' * (line % 97)}" for rank in (0, 1) for line in range(2000)]
    found = result.stdout.splitlines()
    assert found.count("the last line without an end") == 2
    assert sorted(line for line in found if line.startswith("H-")) == sorted(wanted)


def test_lines_for_a_slow_reader_are_not_lost_when_the_ranks_have_ended():
    process = start(*script_words("yes 0123456789 | head -n 20000"), stderr=subprocess.DEVNULL)
    time.sleep(1.5)  # the ranks have written what the pipes hold
    assert process.stdout.read().count("0123456789\n") == 40000
    assert process.wait(timeout=60) == 0


def test_rank_0_ends_when_nobody_reads_its_output():
    """As in ``| head``, and as without the launcher."""
    process = start(*script_words("[ $RANK = 1 ] || yes"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    process.stderr.close()


@pytest.mark.parametrize(
    "script, code",
    [
        ("exit $((RANK * 3))", 3),
        ("exit 0", 0),
        ("[ $RANK = 0 ] || kill -9 $$", 128 + 9),
        # a failure after an exit to be requeued counts
        ("[ $RANK = 0 ] || { sleep 0.5; exit 4; }; exit 85", 4),
    ],
)
def test_exit_code(script, code):
    assert launch(*script_words(script)).returncode == code


def test_one_ranks_death_ends_all(tmp_path):
    # Rank 0 ignores SIGTERM and has a child, as data loader workers are; both must be gone.
    script = (
        "if [ $RANK = 1 ]; then while [ ! -e child ]; do sleep 0.02; done; exit 7; fi;"
        "trap '' TERM; sleep 300 & echo $$ $! > pids; mv pids child; wait; wait"
    )
    result = launch(*script_words(script, 2, "--grace-seconds", "0.5"), cwd=tmp_path)
    assert result.returncode == 7
    assert "rank 1 ended with exit code 7; ending the others" in result.stderr
    assert "ranks [0] are still there; killing them" in result.stderr
    wait_for(lambda: not any(is_alive(p) for p in (tmp_path / "child").read_text().split()))


def test_the_others_may_end_in_good_order(tmp_path):
    script = (
        "[ $RANK = 1 ] && { until [ -e up ]; do sleep 0.02; done; exit 7; };"
        "trap 'sleep 0.3; touch tidy; exit 0' TERM; touch up; while :; do sleep 0.02; done"
    )
    result = launch(*script_words(script), cwd=tmp_path)
    assert result.returncode == 7 and "killing" not in result.stderr
    assert (tmp_path / "tidy").exists()


def test_ranks_die_with_a_killed_launcher(tmp_path):
    process = start(*script_words(f"echo $$ > {tmp_path}/$RANK; exec sleep 300"))
    pids = pids_in(tmp_path / "0", tmp_path / "1")
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_what_a_failed_rank_left_behind_is_ended(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path}/pid; exit 9"
    assert launch("--", "bash", "-c", script).returncode == 9
    wait_for(lambda: not is_alive(*pids_in(tmp_path / "pid")))


def test_output_that_nobody_reads_blocks_no_rank(tmp_path):
    script = (
        f"if [ $RANK = 0 ]; then until [ -e {tmp_path}/done ]; do sleep 0.05; done; exit; fi;"
        f"head -c 300000 /dev/zero | tr '\\0' '\\n'; touch {tmp_path}/done"
    )
    process = start(*script_words(script))
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    process.stderr.close()


def test_a_launcher_that_was_stopped_goes_on(tmp_path):
    """As a shell's Ctrl-Z and fg do, or a batch system that suspends a job."""
    files = [tmp_path / "0", tmp_path / "1"]
    job = start(*script_words(f"echo $$ > {tmp_path}/$RANK; sleep 3"))
    pids_in(*files)
    for _ in range(2):
        os.kill(job.pid, signal.SIGSTOP)
        time.sleep(0.7)  # longer than one wait for a signal
        os.kill(job.pid, signal.SIGCONT)
        time.sleep(0.1)
    assert "Traceback" not in ended(job, 0)


def test_an_ignored_hangup_stays_ignored(tmp_path):
    words = [*LAUNCH, "--", "bash", "-c", f"touch {tmp_path}/up; exec sleep 300"]
    process = start(*words, program=["nohup"], stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "up").exists)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    ended(process, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGTERM, 5), (signal.SIGINT, 5), (signal.SIGUSR1, 85), (signal.SIGUSR2, 6)],
)
def test_signals_reach_every_rank(tmp_path, number, code):
    script = (
        "trap 'echo > term$RANK; exit 5' TERM INT; trap 'echo > usr$RANK; exit 85' USR1;"
        "trap 'echo > usr$RANK; exit 6' USR2; echo > up$RANK; while :; do sleep 0.05; done"
    )
    process = start(*script_words(script), cwd=tmp_path)
    wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    process.send_signal(number)
    ended(process, code)
    name = "term" if code == 5 else "usr"
    assert (tmp_path / f"{name}0").exists()
    # SIGUSR2 makes the ranks fail: the second may be ended before it acts on the signal itself
    assert (tmp_path / f"{name}1").exists() or number == signal.SIGUSR2


def test_a_signal_that_the_ranks_have_had_already(tmp_path):
    """As scancel sends it, to the launcher and its ranks at once; the rank dies first."""
    process = start("--", "bash", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 300")
    (rank,) = pids_in(tmp_path / "pid")
    process.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGTERM)
    wait_for(lambda: not is_alive(rank))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert "Traceback" not in ended(process, 128 + signal.SIGTERM)


def test_a_stop_that_comes_once_the_ranks_have_left_to_grow_is_not_lost(tmp_path):
    """Linux hands over SIGUSR1 first, at which the launcher sees that its last rank has left."""
    script = f"echo $$ > {tmp_path}/pid; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    process = start("--", "bash", "-c", f"{script}; exit {EXIT_GROWN}")
    (rank,) = pids_in(tmp_path / "pid")
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_for(lambda: not is_alive(rank))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    ended(process, 128 + signal.SIGTERM)


def test_ranks_that_leave_to_be_requeued_are_not_ended(tmp_path):
    script = "[ $RANK = 0 ] || { sleep 1; echo > saved; }; exit 85"
    result = launch(*script_words(script), cwd=tmp_path)
    assert result.returncode == 85
    assert (tmp_path / "saved").exists() and "ending" not in result.stderr


_EARLY_REQUEST = """
import os, sys
from fairseq_tutel.launch.binding import RankBinding
from fairseq_tutel.launch.supervise import RankJob, Supervisor
rank = '''import os, signal, sys, time
with open("up", "w") as file:
    file.write(str(os.getpid()))
os.rename("up", "importing")
time.sleep(1)  # a rank that is still importing
signal.signal(signal.SIGUSR1, lambda *a: sys.exit(85))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
time.sleep(300)'''
job = RankJob(0, [sys.executable, "-c", rank], dict(os.environ), RankBinding(0, None, None, 1))
sys.exit(Supervisor([job], 5.0, hold_requests=True).run())
"""


def _early_request(folder):
    program = [sys.executable, "-c", LAUNCHER_ALONE + _EARLY_REQUEST]
    process = start(program=program, cwd=folder, stdout=None)
    wait_for((folder / "importing").exists)
    return process, int((folder / "importing").read_text())


@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_an_early_save_request_is_not_lost(tmp_path, to):
    process, rank = _early_request(tmp_path)
    os.kill(rank if to == "rank" else process.pid, signal.SIGUSR1)
    assert process.wait(timeout=60) == 85


def test_ctrl_c_while_a_rank_is_importing(tmp_path):
    """Python would show where it was; there is nothing to put in order, so SIGTERM ends it."""
    process, _ = _early_request(tmp_path)
    process.send_signal(signal.SIGINT)
    errors = "launch: asked to stop by SIGINT; ending the ranks\n"
    assert ended(process, 128 + signal.SIGINT) == errors


_FIRST_MOMENT = """
import os, runpy, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as the batch scripts start it
def strike(event, arguments):
    if event == "import" and arguments[0] == "fairseq_tutel.launch.cli":
        os.kill(os.getpid(), signal.SIGUSR1)
sys.addaudithook(strike)
runpy.run_module("fairseq_tutel.launch", run_name="__main__", alter_sys=True)
"""
_SAVES_WHEN_ASKED = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *a: sys.exit(85))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # as this package does, imported
time.sleep(25)
"""


@pytest.mark.parametrize(
    "number, script, code",
    [
        # Python's own code after an exception, as where Ctrl-C surprises an import
        (signal.SIGINT, "trap 'exit 1' INT", 128 + signal.SIGINT),
        (signal.SIGTERM, "", 128 + signal.SIGTERM),
        (signal.SIGTERM, "trap '' TERM", 128 + signal.SIGTERM),  # killed in the end
        (signal.SIGTERM, f"trap 'exit {EXIT_GROWN}' TERM", 128 + signal.SIGTERM),
    ],
)
def test_a_launcher_that_is_asked_to_stop_reports_it(tmp_path, number, script, code):
    script = f"{script}\ntouch {tmp_path}/$RANK; while :; do sleep 0.05; done"
    process = start(*script_words(script, 2, "--grace-seconds", "0.5"))
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    process.send_signal(number)
    errors = ended(process, code)
    assert f"launch: asked to stop by {number.name}; ending the ranks\n" in errors
    assert "died" not in errors and "exit code" not in errors


def test_a_save_request_in_the_launchers_first_moment_is_not_lost(tmp_path):
    program = executable(tmp_path / "fairseq-train", f"#!{sys.executable}\n{_SAVES_WHEN_ASKED}")
    first = [sys.executable, "-c", LAUNCHER_ALONE + _FIRST_MOMENT]
    result = launch("--", program, program=first)
    assert result.returncode == 85, result.stderr


def test_an_adopted_process_becomes_its_rank():
    env = environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="h", MASTER_PORT="5")
    process = start("--", "bash", "-c", "echo $$ $RANK $MASTER_ADDR $MASTER_PORT", env=env)
    output, errors = process.communicate(timeout=60)
    assert output == f"{process.pid} 1 h 5\n" and errors == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_printed_once_before_anything_starts(tmp_path, rank):
    env = environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    program = executable(tmp_path / "fairseq-train", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    result = launch("--", program, "--moe-expert-count", "3", env=env)
    assert result.returncode == 2 and not (tmp_path / "started").exists()
    message = "launch: error: 3 experts cannot be spread over 2 ranks"
    assert (message in result.stderr) if rank == 0 else (result.stderr == "")


def test_dry_run_starts_nothing_and_imports_neither_torch_nor_fairseq(tmp_path):
    words = ["--nproc-per-node", "2", "--dry-run", "--", "touch", str(tmp_path / "x")]
    result = launch(*words, env=environment(PYTHONPROFILEIMPORTTIME="1"))
    assert result.returncode == 0 and not (tmp_path / "x").exists()
    assert result.stdout.count(f"touch {tmp_path}/x") == 2 and "RANK=1 " in result.stdout
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "fairseq_tutel.launch.cli" in imported
    assert not imported & {"torch", "fairseq", "numpy"}


def test_torchruns_ranks_are_adopted():
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --standalone -m fairseq_tutel.launch --"
    script = ["bash", "-c", "echo got $RANK of $WORLD_SIZE"]
    result = launch(*torchrun.split(), *script, program=[sys.executable], timeout=90)
    assert result.returncode == 0, result.stderr
    assert "2 ranks on 1 node (adopted from torchrun), gloo" in result.stderr
    assert sorted(result.stdout.splitlines()) == ["got 0 of 2", "got 1 of 2"]


@pytest.mark.parametrize(("program", "said"), [("fairseq-train", "1"), ("fairseq-hydra-train", "")])
def test_ranks_know_whether_they_would_be_started_again(tmp_path, program, said):
    script = executable(tmp_path / program, "#!/bin/sh\necho said=$FAIRSEQ_TUTEL_RESTARTS.\n")
    done = launch("--nproc-per-node", "1", "--bind", "none", "--", script)
    assert f"said={said}." in done.stdout, done.stderr
