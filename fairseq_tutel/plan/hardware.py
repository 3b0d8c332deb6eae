"""Hardware profiles (``configs/hardware/*.yaml``) and the time of one update on them.

The model is plain arithmetic: every part runs at a fixed share of its peak, one after the other.
What it leaves out: overlap of communication and computation (faster), waiting for the slowest
rank, uneven experts, data loading (slower). Its figures are predictions, not measurements.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from ..config import EXCHANGES
from .memory import Memory
from .parameters import Parameters
from .settings import Settings
from .work import Work


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU (or CPU rank) in its nodes; every number has a source in its YAML file.

    Attributes:
        title: in words.
        gpus_per_node: GPUs behind one fast interconnect.
        memory: bytes of one GPU that a process can have.
        reserved: bytes that are not ours: context, libraries, fragmentation.
        half_flops, fp32_flops: peak of matrix products, per second.
        matmul_efficiency: share of that peak that large matrix products reach in training.
        memory_bandwidth: bytes per second.
        memory_efficiency: share of it that elementwise kernels reach.
        node_bandwidth: bytes per second that one GPU sends inside its node.
        network_bandwidth: bytes per second that one GPU sends out of its node.
        link_efficiency: share of both that collectives reach.
        latency: seconds to start a collective.
        message_overhead: seconds per message to one peer.
    """

    title: str
    gpus_per_node: int
    memory: float
    reserved: float
    half_flops: float
    fp32_flops: float
    matmul_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    node_bandwidth: float
    network_bandwidth: float
    link_efficiency: float
    latency: float
    message_overhead: float


def load_hardware(directory: Path, name: str) -> Hardware:
    """Read ``hardware/NAME.yaml`` beside the configs.

    Raises:
        ValueError: no such file, a number missing, unknown, not positive or without a source.
    """
    path = directory / "hardware" / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ValueError(f"no hardware profile {name!r} in {path.parent} (there are: {known})")
    data = OmegaConf.to_container(OmegaConf.load(path))
    fields = {field.name for field in dataclasses.fields(Hardware)}
    if set(data) != fields:
        odd = ", ".join(sorted(set(data) ^ fields))
        raise ValueError(f"{path}: missing or unknown keys: {odd}")
    numbers = {"title": str(data.pop("title"))}
    for key, entry in data.items():
        if not isinstance(entry, dict) or not entry.get("source"):
            raise ValueError(f"{path}: {key} has no source")
        value = entry["value"]
        if not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{path}: {key} is {value!r}, not a number >= 0")
        numbers[key] = value
    return Hardware(**numbers)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update, by part.

    Attributes:
        matmul: matrix products.
        elementwise: everything else that passes over activations and logits.
        optimizer: the update of the weights.
        all_to_all: exchanges of the MoE layers.
        all_reduce: gradients of dense and of replicated parameters.
    """

    matmul: float
    elementwise: float
    optimizer: float
    all_to_all: float
    all_reduce: float

    @property
    def total(self) -> float:
        """Seconds of an update."""
        return sum(dataclasses.astuple(self))

    @property
    def all_to_all_share(self) -> float:
        """Share of the all-to-alls in the update, 0..1."""
        return self.all_to_all / self.total


def predict(
    settings: Settings, parameters: Parameters, memory: Memory, work: Work, hardware: Hardware
) -> StepTime:
    """Time of one update.

    Elementwise kernels are taken to write what the backward pass keeps, read it, read it again
    there and write a gradient of its size (4 passes, 2 more for recomputation), and the optimizer
    to be a fused kernel that moves each value it needs once.
    """
    b = settings.precision.element
    flops = hardware.half_flops if b == 2 else hardware.fp32_flops
    stream = hardware.memory_bandwidth * hardware.memory_efficiency
    passes = 6 if settings.model.checkpoint_activations else 4
    kept = memory.without_checkpointing * passes + 2 * memory.logits
    return StepTime(
        matmul=work.tokens * work.hardware_flops / (flops * hardware.matmul_efficiency),
        elementwise=settings.update_freq * kept / stream,
        optimizer=parameters.per_gpu * _optimizer_bytes(settings) / stream,
        all_to_all=work.exchanges
        * EXCHANGES.get(str(settings.model.moe_a2a)).predict(
            work.exchange_bytes, work.exchange_peers, hardware
        ),
        all_reduce=_all_reduce_time(work.reduce_bytes, settings.gpus, hardware)
        + _replica_time(work, settings, hardware),
    )


def _optimizer_bytes(settings: Settings) -> int:
    """Bytes moved per parameter: norm of the gradient, maximum of the statistics, update."""
    precision = settings.precision
    b, statistics = precision.element, 2 * precision.statistic
    master = 4 + 4 + 4 + b if precision.master_copies else 0  # copies written and read again
    update = 2 * b + b + 2 * statistics
    maximum = b + statistics if precision.statistic == 2 else 0
    return b + maximum + update + master


def _all_reduce_time(size: float, ranks: int, hardware: Hardware) -> float:
    """Ring all-reduce; between nodes the rings use all network ports of a node at once."""
    if ranks < 2 or not size:
        return 0.0
    local = min(ranks, hardware.gpus_per_node)
    bandwidth = hardware.node_bandwidth
    if ranks > hardware.gpus_per_node:
        bandwidth = min(bandwidth, hardware.network_bandwidth * local)
    carried = 2 * size * (ranks - 1) / ranks / (bandwidth * hardware.link_efficiency)
    return carried + hardware.latency * 2 * math.log2(ranks)


def _replica_time(work: Work, settings: Settings, hardware: Hardware) -> float:
    """Replicas of an expert are E ranks apart: on other nodes if E >= GPUs per node."""
    if work.replicas < 2:
        return 0.0
    near = work.exchange_peers < hardware.gpus_per_node >= settings.gpus
    bandwidth = hardware.node_bandwidth if near else hardware.network_bandwidth
    ring = 2 * work.replica_bytes * (work.replicas - 1) / work.replicas
    return ring / (bandwidth * hardware.link_efficiency) + hardware.latency
