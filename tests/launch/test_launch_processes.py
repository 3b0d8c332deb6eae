"""Ranks as real processes under torch's agent, which is ``$PPID``: ends, signals, output."""

import os
import subprocess
import sys
import time

import pytest
from helpers.commands import executable, variables

LAUNCH = ["-m", "fairseq_tutel.launch", "--bind", "none"]
MEET = "touch up$RANK; until [ -e up0 ] && [ -e up1 ]; do sleep 0.02; done; "
REQUEUE = "echo 85 > $FAIRSEQ_TUTEL_LAUNCHER/outcome; exit 0"
STAY, RANK_1 = "while :; do sleep 0.05; done", "[ $RANK = 0 ] || "
# A trainer: both signals are held back until it asks for them. SLURM may signal the ranks, too.
TRAINER = f"""#!{sys.executable}
import os, signal, sys, time
def save(*_):
    open(os.environ["FAIRSEQ_TUTEL_LAUNCHER"] + "/outcome", "w").write("85")
    sys.exit(0)
if "own" in sys.argv:
    os.kill(os.getpid(), signal.SIGUSR1)
if "Ctrl-C" in sys.argv and os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGINT)
assert signal.signal(signal.SIGUSR1, save) == signal.SIG_DFL
time.sleep(0.2)  # it imports
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGUSR1}})  # as trainer/requeue.py does
time.sleep(30)
"""


@pytest.fixture
def launched(programs, tmp_path):
    """Runs the launcher with words; nothing that the ranks have started outlives it."""

    def run(*words, **how):
        mark = f"{tmp_path.name}-{os.getpid()}"
        how = {"cwd": tmp_path, "MARK": mark, "CUDA_VISIBLE_DEVICES": "", "timeout": 120, **how}
        done = programs.run([*LAUNCH, *words], **how)
        for _ in range(500):
            if subprocess.run(f"grep -qs {mark} /proc/[0-9]*/environ", shell=True).returncode:
                return done
            time.sleep(0.02)
        pytest.fail("processes are left")

    return run


def script(text):
    return ["--nproc-per-node", "2", "--", "bash", "-c", text]


_STRIKE = """
import os, signal, sys, types
def strike(name, *_):
    return os.kill(os.getpid(), signal.SIGTERM) if name == "torch.distributed.launcher" else None
sys.meta_path.insert(0, types.SimpleNamespace(find_spec=strike))
"""
_RAISE = """
import torch.distributed, torch.distributed.launcher.api as api, unittest.mock
api.launch_agent = unittest.mock.Mock(side_effect={}("no more\\nC++ stack"))
"""
_PENDING = """
import os, signal
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as batch scripts start it
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
import fairseq_tutel.launch.__main__
os.kill(os.getpid(), signal.SIGUSR1)
"""
_REQUESTED = "import os; open(os.environ['FAIRSEQ_TUTEL_FOLDER'] + '/requested', 'w').close()"
_OFTEN = "import fairseq_tutel.launch.agent as agent; agent.FRESH = 0.05"
_OLD = "F=$FAIRSEQ_TUTEL_LAUNCHER/job.json; touch -d 2000-01-01 old $F; "
_FRESH = "for i in $(seq 200); do [ $F -nt old ] && exit 0; sleep 0.05; done; exit 1"
_NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
_TIDY = "trap 'sleep 0.3; touch tidy; exit 5' TERM; "
# what the ranks run, the launcher's code, its last line, what runs before it, files that are left
ENDS = {
    "good": ("exit 0", 0, ""),
    "a rank is killed": (RANK_1 + f"kill -9 $$; {STAY}", 137, "rank 1 died of signal 9"),
    "it leaves a process behind": ("sleep 300 & exit 9", 9, "ended with exit code 9"),
    "a rank fails": (MEET + RANK_1 + f"exit 7; {STAY}", 7, "rank 1 ended with exit code 7"),
    "in good order": (f"{_TIDY}{MEET}{RANK_1}exit 7; {STAY}", 7, "exit code 7", "", "tidy"),
    "a failure beside a requeue": (RANK_1 + f"{{ sleep 0.5; exit 4; }}; {REQUEUE}", 4, "code 4"),
    # that no rank has had: SLURM's reach the launcher alone where it tracks processes by cgroups
    "a request to the launcher alone": (
        f"trap 'touch heard$RANK; {REQUEUE}' USR1; {MEET} {RANK_1} kill -USR1 $PPID; {STAY}",
        85, "", "", "heard0 heard1"),
    "SIGUSR2": (f"trap 'exit 6' USR2; {MEET} {RANK_1} kill -USR2 $PPID; {STAY}", 6, "code 6"),
    "SIGTERM": (f"{_TIDY}{MEET}{RANK_1}kill -TERM $PPID; {STAY}", 143, "stopped by SIGTERM",
                "", "tidy"),
    "Ctrl-C": (f"trap 'exit 1' INT; {MEET} {RANK_1} kill -INT $PPID; {STAY}", 130, "by SIGINT"),
    "Ctrl-C while ranks import": (["Ctrl-C"], 130, "by SIGINT"),
    "the launcher is killed": (f"{MEET} {RANK_1} kill -9 $PPID; {STAY}", -9, "", "", "temporary"),
    "the launcher ignores": ("kill -HUP $PPID; kill -HUP $$; sleep 0.3; exit 0", 0, "", _NOHUP),
    "a request before Python has begun": ([], 85, "", _REQUESTED),
    "a request as the launcher begins": ([], 85, "", _PENDING),
    "a request to ranks that import": (["own"], 85, ""),
    "SIGTERM while torch is imported": ("exit 0", -15, "", _STRIKE),
    "a cleaner of /tmp may come": (_OLD + _FRESH, 0, "", _OFTEN),
    "no other nodes": ("exit 0", 2, "error: node 0 of 1 did not meet the others at 127.0.0.1:",
                       _RAISE.format("torch.distributed.DistStoreError")),
    "no threads": ("exit 0", 2, "error: no more", _RAISE.format("RuntimeError")),
    "no memory": ("exit 0", 2, "error: no more", _RAISE.format("OSError")),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_one_code_and_one_line_for_each_end(launched, tmp_path, end):
    text, code, said, prelude, files = (*ENDS[end], "", "")[:5]
    for each in (folder := tmp_path / "folder", temporary := tmp_path / "temporary"):
        each.mkdir()
    trainer = executable(tmp_path / "fairseq-train", TRAINER)
    words = script(text) if isinstance(text, str) else [*script("")[:3], trainer, *text]
    env = {"FAIRSEQ_TUTEL_FOLDER": str(folder)} if prelude == _REQUESTED else {}
    prelude = f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n{prelude}"
    done = launched(*words, prelude=prelude, **env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("launch: ")]
    assert done.status == code, done.stderr
    assert len(lines) == 3 + bool(said), done.stderr  # what is started, and where the ranks are
    assert said in lines[-1]
    for noise in ("torch", "Traceback", "stack"):
        assert noise not in done.stderr
    left = {"tidy", "heard0", "heard1", "temporary"} & {
        path.name for path in tmp_path.iterdir() if path != temporary or any(path.iterdir())
    }
    assert left == set(files.split()) and folder.exists() == (not env)


# Writes like Python to a file or pipe. What importing fairseq prints, and what is somebody else's.
_WRITES = f"""#!{sys.executable}
import logging, os, sys, warnings
logging.basicConfig(level=logging.INFO)
warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", FutureWarning)
logging.getLogger("fairseq.tasks.text_to_speech").info("Please install tensorboardX: pip install")
warnings.warn("a warning of the user's", FutureWarning)
for line in range(2000):
    print(f"H-{{os.environ['RANK']}}-{{line}}", "x" * (line % 97))
print("the last line without an end", end="")
print("the last error", end="", file=sys.stderr)
print(sys.stdin.read())
"""


@pytest.mark.parametrize("everything", ["0", "1"])
def test_lines_come_whole_and_imports_without_noise(launched, tmp_path, everything):
    program = executable(tmp_path / "fairseq-generate", _WRITES)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('the own start\\n')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "FAIRSEQ_TUTEL_WARNINGS": everything, "PYTHONWARNINGS": ""}
    env |= {"PYTHONUNBUFFERED": "1"}  # many set it for logs
    done = launched(*script("")[:3], program, text=" of standard input", **env)
    assert done.status == 0, done.stderr
    wanted = [f"H-{rank}-{line} {'x' * (line % 97)}" for rank in (0, 1) for line in range(2000)]
    wanted += [f"the last line without an end{end}" for end in ("", " of standard input")]
    found = [line for line in done.stdout.splitlines() if line.startswith(("H-", "the last"))]
    assert sorted(found) == sorted(wanted)
    for line in ("a warning of the user's", "the own start", "the last error"):
        assert done.stderr.count(line) >= 2, line
    for noise in ("torch.jit", "tensorboardX"):
        assert (noise in done.stderr) == (everything == "1")
    assert "[rank 1] " in done.stderr and "[rank 1]" not in done.stdout


# makes each process the task of a node of a SLURM job
_NODES = """
import os, sys
rank = os.environ.pop("RANK")
del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
os.environ |= {"SLURM_PROCID": rank, "SLURM_NODEID": rank}
open(f"task{rank}", "w").write(str(os.getpid()))
"""
_STEP = "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0"
_WHERE = "touch rank$RANK-$LOCAL_RANK-$GROUP_RANK-of-$WORLD_SIZE"
_UP = "until [ -e up0 ] && [ -e up2 ]; do sleep 0.02; done; "
_FAIL = f"[ $LOCAL_RANK = 0 ] || sleep 20; touch up$RANK; {_UP}"


@pytest.mark.parametrize(
    ("words", "change", "code", "said"),
    [
        (_WHERE, "pass", 0, ""),
        # the first node's launcher is first to see a failure, and ends the step
        (f"{_FAIL}[ $RANK = 0 ] && exit 1; sleep 0.6; exit 7",
         "pass", 1, "rank 2 ended with exit code 7"),
        (_WHERE, "sys.argv[5] = '3'", 2, "ranks of bash, gloo on the CPU, they start 5 (5)"),
        (_WHERE, "sys.argv[7:] = ['true']", 2, "gloo on the CPU, they start 4 (2)"),
        # of one node alone: the other waits for it until the step ends
        (_WHERE, "sys.argv[4:4] = ['--nnodes', '3']", 2,
         f"error on {os.uname().nodename}: --nnodes 3 contradicts srun, which states 2"),
    ],
)  # fmt: skip
def test_nodes_of_a_slurm_job_meet(launched, tmp_path, port, words, change, code, said):
    (tmp_path / "bin").mkdir()  # the other node would wait for the one that ends
    executable(tmp_path / "bin/scancel", '#!/bin/sh\necho "$@" > words; kill $(cat task*)\n')
    env = variables(f"{_STEP} SLURM_NNODES=2 SLURM_JOB_ID={port} MASTER_ADDR=127.0.0.1")
    env |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    alone = variables("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1") if "nnodes" in change else {}
    how = {"prelude": f"{_NODES}\nif rank == '1':\n    {change}", "launched": False, **alone}
    done = launched(*script(words), ranks=1 if alone else 2, **how, **env)
    assert said in done.stderr and (done.status == 0) == (code == 0), done.stderr
    assert not alone or done.status == code
    wanted = [f"rank{rank}-{rank % 2}-{rank // 2}-of-4" for rank in range(4)]
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ([] if code else wanted)
    asked = (tmp_path / "words").read_text() if code else ""
    assert asked == (f"--signal=TERM {port}.0\n" if code else "")


def test_ranks_of_mpirun_and_torchrun_become_their_program(launched, programs, port):
    prelude = "import os; open('pid', 'w').write(str(os.getpid()))"
    of_mpirun = "OMPI_COMM_WORLD_{}=1 OMPI_COMM_WORLD_{}=2 OMPI_COMM_WORLD_{}=1"
    of_mpirun = variables(of_mpirun.format("RANK", "SIZE", "LOCAL_RANK"))
    words = "[ $$ = $(cat pid) ] && echo $RANK of $WORLD_SIZE$FAIRSEQ_TUTEL_LAUNCHER"
    of_mpirun["FAIRSEQ_TUTEL_LAUNCHER"] = "another's"
    done = launched("--", "bash", "-c", words, prelude=prelude, **of_mpirun)
    assert (done.status, done.stdout, done.stderr) == (0, "1 of 2\n", "")
    torchrun = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port}".split()
    words = [*torchrun, *LAUNCH, "--", "bash", "-c", "echo got $RANK of $WORLD_SIZE"]
    done = programs.run(words, CUDA_VISIBLE_DEVICES="", timeout=120)
    assert done.status == 0, done.stderr
    assert "2 ranks on 1 node (adopted from torchrun), gloo" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["got 0 of 2", "got 1 of 2"]
