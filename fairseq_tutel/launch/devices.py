"""Which GPUs the ranks of this node can use, found without importing torch where possible."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .topology import normalise_pci_id

_QUERY_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    bus = [getattr(p, "pci_%s_id" % n, None) for n in ("domain", "bus", "device")]
    print("GPU", "-" if None in bus else "%04x:%02x:%02x.0" % tuple(bus))
"""


@dataclass(frozen=True)
class Gpu:
    """index: what the ranks call it (as --device-id); pci_id: its address as /sys spells it, None
    if unknown."""

    index: int
    pci_id: str | None


def torch_is_cpu_build() -> bool:
    """Whether the installed torch can use no GPU at all, read from torch/version.py as text."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False  # no torch here: the command may well be another interpreter's
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    if not version.is_file():
        return False
    values = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", version.read_text(), re.MULTILINE))
    return bool(values) and all(value == "None" for value in values.values())


def has_gpu_files(root: str | Path = "/") -> bool:
    """Whether a GPU's driver shows itself: /dev/nvidiaN, /dev/dxg (WSL) or /dev/kfd (AMD)."""
    dev = Path(root) / "dev"
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists() or (dev / "kfd").exists()


def _run(command: list[str], env: Mapping[str, str]) -> str | None:
    try:
        result = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _from_torch(env: Mapping[str, str], run: Callable) -> list[Gpu]:
    found = re.findall(r"^GPU (\S+)$", run([sys.executable, "-c", _QUERY_TORCH], env) or "", re.M)
    return [Gpu(i, None if pci == "-" else pci) for i, pci in enumerate(found)]


def _from_nvidia_smi(env: Mapping[str, str], run: Callable) -> list[Gpu] | None:
    """The visible GPUs in the order of CUDA_VISIBLE_DEVICES; None if torch has to be asked."""
    text = run(
        [
            "nvidia-smi",
            "--format=csv,noheader",
            "--query-gpu=index,pci.bus_id,uuid,mig.mode.current",
        ],
        env,
    )
    if not text:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
    if any(len(row) != 4 or row[3] == "Enabled" for row in rows):
        return None  # MIG slices are numbered by rules of their own
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        chosen = rows
    else:
        chosen = []
        for token in visible.split(","):
            match = [
                row
                for row in rows
                if token.strip() == row[0] or (token.strip() and row[2].startswith(token.strip()))
            ]
            if len(match) != 1:
                break  # CUDA hides everything from the first unknown entry on
            chosen.append(match[0])
    return [Gpu(i, normalise_pci_id(row[1])) for i, row in enumerate(chosen)]


def why_no_gpus(env: Mapping[str, str], root: str | Path = "/") -> str:
    """Why ``visible_gpus`` is empty on a machine that seems to have GPUs; "" if nothing is odd."""
    if not has_gpu_files(root) or "CUDA_VISIBLE_DEVICES" in env:
        return ""
    if torch_is_cpu_build():
        return "this machine has GPUs, but the installed torch is a build for the CPU"
    return "this machine has GPU device files, but neither nvidia-smi nor torch lists a GPU"


def visible_gpus(
    env: Mapping[str, str], root: str | Path = "/", run: Callable | None = None
) -> list[Gpu]:
    """GPUs that torch would see under ``env``, numbered as with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Without a GPU's device file, or with a CPU build of torch, that is none, and nothing is run.
    nvidia-smi lists them otherwise; torch itself, in a process of its own, where nvidia-smi is
    missing (AMD) or cannot list them (MIG). ``run`` replaces running them, in tests.
    """
    if env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return []
    if not has_gpu_files(root) or torch_is_cpu_build():
        return []
    run = run or _run
    gpus = _from_nvidia_smi(env, run)
    return _from_torch(env, run) if gpus is None else gpus


def installed_gpus(root: str | Path = "/") -> list[str]:
    """PCI addresses of all NVIDIA GPUs of the machine, also of those hidden from this process."""
    return sorted(path.name for path in (Path(root) / "proc/driver/nvidia/gpus").glob("*:*"))
