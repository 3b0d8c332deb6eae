"""The time of one update on some hardware.

The model is plain arithmetic: every part runs at a fixed share of its peak, one after the other;
only exchanges may overlap, with the experts of their layer (see :mod:`.exchange`). What it leaves
out: overlap of the gradients' all-reduce (faster), waiting for the slowest rank, uneven experts,
data loading (slower). Its figures are predictions, not measurements.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .exchange import exchange_time
from .flow import gather_time, make_flow, ring_time, scatter_time
from .formulation import held_parameters, kept_bytes, mask_flops, sharded_bytes, table_time
from .hardware import Hardware
from .memory import Memory
from .parameters import Parameters
from .settings import Settings
from .work import Work


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update, by part.

    Attributes:
        matmul: matrix products.
        elementwise: everything else that passes over activations and logits.
        optimizer: the update of the weights.
        all_to_all: that MoE layers wait for their exchanges, casts for the wire included.
        weights: gathers of experts' weights, and their gradients' way back, of r-flow.
        all_reduce: gradients of dense and of replicated parameters.
    """

    matmul: float
    elementwise: float
    optimizer: float
    all_to_all: float
    weights: float
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
    there and write a gradient of its size (4 passes, 2 more for recomputation; the tables of the
    dense formulation are counted one by one), and the optimizer to be a fused kernel that moves
    each value it needs once.
    """
    exchange = exchange_time(settings, parameters, work, hardware)
    stream = hardware.memory_bandwidth * hardware.memory_efficiency
    passes = 6 if settings.model.checkpoint_activations else 4
    activations = memory.without_checkpointing - kept_bytes(settings, parameters)
    kept = activations * passes + 2 * memory.logits
    # a gather or a reduce-scatter sends half of what an all-reduce does
    reduced = sharded_bytes(settings, parameters) or 2 * work.reduce_bytes
    updated = held_parameters(settings, parameters)
    return StepTime(
        matmul=work.tokens
        * (work.hardware_flops + parameters.moe_layers * mask_flops(settings))
        / (hardware.flops(settings.precision.element) * hardware.matmul_efficiency),
        elementwise=settings.update_freq * kept / stream
        + table_time(settings, parameters, hardware),
        optimizer=updated * _optimizer_bytes(settings) / stream,
        all_to_all=exchange.exposed + exchange.casts,
        weights=_gathers(settings, parameters, hardware),
        all_reduce=2 * ring_time(reduced / 2, settings.gpus, hardware.gpus_per_node, hardware)
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


def _gathers(settings: Settings, parameters: Parameters, hardware: Hardware) -> float:
    """Each layer's weights in every forward pass (again in a recomputation), gradients once."""
    if not settings.routing:
        return 0.0
    known = make_flow(settings, parameters), settings.precision.element, hardware
    passes = 2 if settings.model.checkpoint_activations else 1
    one = passes * gather_time(*known) + scatter_time(*known)
    return settings.update_freq * parameters.moe_layers * one


def _replica_time(work: Work, settings: Settings, hardware: Hardware) -> float:
    """Replicas of an expert are P GPUs apart: on other nodes if P >= GPUs per node."""
    if work.replicas < 2:
        return 0.0
    near = max(1, hardware.gpus_per_node // settings.exchange_peers)
    return 2 * ring_time(work.replica_bytes, work.replicas, near, hardware)
