"""Which ranks share a machine, found from the machines themselves."""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Hashable, Sequence
from pathlib import Path

from .gather import gather_integers
from .world import once_per_world, process_world

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def ranks_per_node() -> int:
    """m if every machine holds m consecutive ranks, the same number on each; else 0.

    A collective call of all ranks when first made.
    """
    return once_per_world("ranks per node", _find)


def _find() -> int:
    if process_world()[1] == 1:
        return 1
    return even_nodes([machine for (machine,) in gather_integers([this_machine()])])


def this_machine() -> int:
    """A number that ranks on one machine share: of its boot id and host name.

    Machines started from one image may have the same name, and containers on one machine the same
    boot id; the two together distinguish what does not share memory.
    """
    boot = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else ""
    digest = hashlib.sha256(f"{boot}\n{socket.gethostname()}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def even_nodes(machines: Sequence[Hashable]) -> int:
    """Ranks per node, given the machine of every rank; 0 if nodes are unequal or interleaved."""
    runs = [(machine, len(list(run))) for machine, run in itertools.groupby(machines)]
    lengths = {length for _, length in runs}
    once_each = len({machine for machine, _ in runs}) == len(runs)
    return lengths.pop() if once_each and len(lengths) == 1 else 0
