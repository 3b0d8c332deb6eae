"""Made-up machines (files under /sys and /dev), and the programs of ranks."""

from pathlib import Path

from fairseq_tutel.launch.machine import parse_cpulist

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
    numa, gpus = numa or TWO_SOCKETS, gpus or EIGHT_GPUS
    files = {f"sys/devices/system/node/node{node}/cpulist": text for node, text in numa.items()}
    for cpu in (cpu for text in numa.values() for cpu in parse_cpulist(text)):
        low = cpu % threads_apart if threads_apart else cpu
        siblings = f"{low},{low + threads_apart}" if threads_apart else str(cpu)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    for i, (pci, node) in enumerate(gpus.items()):
        files |= {f"sys/bus/pci/devices/{pci}/numa_node": str(node), f"dev/nvidia{i}": ""}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (root / "sys/class/net/lo").mkdir(parents=True)
    return root


def as_torch_lists(pcis=tuple(EIGHT_GPUS)):
    """A stand-in for asking torch, which lists GPUs as far as they are visible."""

    def ask(env):
        visible = env.get("CUDA_VISIBLE_DEVICES")
        chosen = range(len(pcis)) if visible is None else map(int, visible.split(","))
        return "".join(f"GPU {pcis[i]}\n" for i in chosen)

    return ask


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def variables(text: str) -> dict[str, str]:
    """Variables by name; a tilde stands for a blank in a value."""
    return dict(word.replace("~", " ").split("=", 1) for word in text.split())
