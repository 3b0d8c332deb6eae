"""Hardware profiles (``configs/hardware/*.yaml``)."""

from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import OmegaConf


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU (or CPU rank) in its nodes; the YAML file has a source for every number."""

    title: str
    gpus_per_node: int  # GPUs behind one fast interconnect
    memory: float  # bytes of one GPU that a process can have
    reserved: float  # bytes for context, libraries and fragmentation
    half_flops: float  # peak of matrix products, per second
    fp32_flops: float
    matmul_efficiency: float  # share of that peak that large matrix products reach in training
    memory_bandwidth: float  # bytes per second
    memory_efficiency: float  # share of it that elementwise kernels reach
    node_bandwidth: float  # bytes per second that one GPU sends inside its node
    network_bandwidth: float  # bytes per second that one GPU sends out of its node
    link_efficiency: float  # share of both that collectives reach
    latency: float  # seconds to start a collective
    message_overhead: float  # seconds per message to one peer
    # share of the peak that one large product reaches; a profile may leave it out
    product_efficiency: float = 0.75

    def flops(self, element: int) -> float:
        """Return the peak of matrix products, per second, for numbers of ``element`` bytes."""
        return self.half_flops if element == 2 else self.fp32_flops

    def product_rate(self, element: int) -> float:
        """Return FLOPs per second that matrix products of such numbers reach."""
        return self.flops(element) * self.matmul_efficiency

    @property
    def stream(self) -> float:
        """Bytes per second that elementwise kernels reach."""
        return self.memory_bandwidth * self.memory_efficiency

    def neighbours(self, stride: int) -> int:
        """Return how many of the GPUs ``stride`` apart are in one node."""
        return max(1, self.gpus_per_node // stride)


def load_hardware(directory: Path, name: str) -> Hardware:
    """Read ``hardware/NAME.yaml`` beside the configs.

    Raises:
        ValueError: there is no such file, or a number is missing, unknown, negative or without a
            source.
    """
    path = directory / "hardware" / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ValueError(f"no hardware profile {name!r} in {path.parent} (there are: {known})")
    data = OmegaConf.to_container(OmegaConf.load(path))
    names = {field.name for field in fields(Hardware)}
    optional = {"product_efficiency"}
    if set(data) | optional != names:
        odd = ", ".join(sorted((set(data) ^ names) - optional))
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
