"""Made-up machines (files under /sys, /dev and /proc) and ranks as real processes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.programs import environment_outside_jobs

import fairseq_tutel
from fairseq_tutel.launch.binding import parse_cpulist

# Two sockets of 8 cores with 2 threads each, and 8 GPUs: the usual layout of an HGX node, in small.
# Thread siblings are N and N + 16. GPUs 0, 1, 4, 5 are on socket 0: their order does not tell.
TWO_SOCKETS = {0: "0-7,16-23", 1: "8-15,24-31"}
EIGHT_GPUS = {
    "0000:07:00.0": 0, "0000:0b:00.0": 0, "0000:48:00.0": 1, "0000:4c:00.0": 1,
    "0000:88:00.0": 0, "0000:8b:00.0": 0, "0000:c8:00.0": 1, "0000:cb:00.0": 1,
}  # fmt: skip


def make_machine(root: Path, numa=None, gpus=None, threads_apart=16) -> Path:
    """Writes a machine below `root`: NUMA nodes {number: cpulist} and GPUs {PCI id: NUMA node}.

    threads_apart: CPU c and c + threads_apart share a core; 0: one thread per core.
    """
    numa = TWO_SOCKETS if numa is None else numa
    gpus = EIGHT_GPUS if gpus is None else gpus
    files, every = {}, set()
    for node, cpulist in numa.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpulist
        every |= set(parse_cpulist(cpulist))
    for cpu in every:
        low = cpu % threads_apart if threads_apart else cpu
        siblings = f"{low},{low + threads_apart}" if threads_apart else str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    for i, (pci, node) in enumerate(gpus.items()):
        files[f"sys/bus/pci/devices/{pci}/numa_node"] = str(node)
        files[f"dev/nvidia{i}"] = ""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (root / "sys/class/net/lo").mkdir(parents=True)
    (root / "dev").mkdir(exist_ok=True)
    return root


def as_torch_lists(gpus=None):
    """A stand-in for asking torch, which lists `gpus` as far as they are visible."""
    pcis = list(EIGHT_GPUS if gpus is None else gpus)

    def ask(env):
        visible = env.get("CUDA_VISIBLE_DEVICES")
        chosen = range(len(pcis)) if visible is None else map(int, visible.split(","))
        return "".join(f"GPU {pcis[i]}\n" for i in chosen)

    return ask


def value_after(argv, flag):
    return argv[argv.index(flag) + 1]


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# For scripts run by a test: the launcher's modules without the package's import of fairseq.
LAUNCHER_ALONE = f"""
import sys, types
package = types.ModuleType("fairseq_tutel")
package.__path__ = {list(fairseq_tutel.__path__)!r}
sys.modules["fairseq_tutel"] = package
"""

LAUNCH = [sys.executable, "-m", "fairseq_tutel.launch"]


def environment(**variables):
    return {**environment_outside_jobs(), "CUDA_VISIBLE_DEVICES": "", **variables}


def launch(*words, program=LAUNCH, env=None, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([*program, *words], env=env or environment(), **options)


def start(*words, program=LAUNCH, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*program, *words],
        # a shell's background jobs, and so tests run by one, begin with SIGINT ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"env": environment(), **pipes, **options},
    )


def start_nodes(port, *commands, pause=0, **options):
    """The launchers of a job's nodes, each with one of the commands, some seconds apart."""
    words = f"--nnodes {len(commands)} --master-addr 127.0.0.1 --master-port {port}".split()
    nodes = []
    for number, command in enumerate(commands):
        time.sleep(pause if number else 0)
        nodes.append(start(*words, "--node-rank", str(number), *command, **options))
    return nodes


def ended(process, code):
    """Wait for the end of a process with this exit code; return what it wrote to stderr."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    return errors


def script_words(script, ranks=2, *options):
    return ["--nproc-per-node", str(ranks), *options, "--", "bash", "-c", script]


def pids_in(*files):
    """What the ranks have written there, once they have."""
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
