"""GPUs that the ranks of this node can use, found without importing torch in this process."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_QUERY_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    bus = [getattr(p, "pci_%s_id" % n, None) for n in ("domain", "bus", "device")]
    print("GPU", "-" if None in bus else "%04x:%02x:%02x.0" % tuple(bus))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    index: int  # what the ranks call it (as --device-id)
    pci_id: str | None  # its address as /sys spells it; None if unknown


def has_gpu_files(root: str | Path = "/") -> bool:
    """Return whether there are a GPU's files: /dev/nvidiaN, /dev/dxg (WSL) or /dev/kfd (AMD)."""
    dev = Path(root) / "dev"
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists() or (dev / "kfd").exists()


def ask_torch(env: Mapping[str, str]) -> str:
    """Return what torch lists in a process of its own; "" if it fails."""
    command = [sys.executable, "-c", _QUERY_TORCH]
    try:
        result = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def visible_gpus(env: Mapping[str, str], root: str | Path = "/") -> list[Gpu]:
    """Return the GPUs that torch sees under ``env``, by default in the order of PCI addresses."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if hidden or not has_gpu_files(root):
        return []
    listed = ask_torch({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **env})
    found = re.findall(r"^GPU (\S+)$", listed, re.M)
    return [Gpu(i, None if pci == "-" else pci) for i, pci in enumerate(found)]
