"""Plans: counts, memory, work and time of a run, or the reason why it cannot run."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from ..config import EXPERT_PLACEMENTS, OVERLAP_DEGREES, GrowAt
from ..distributed import possible_r
from ..distributed.exchanges import exchange_candidates
from .any_model import is_any_model, memory_of_model
from .gpu_memory import Memory, count_memory, make_layers
from .hardware import Hardware
from .parameters import Parameters, count_parameters
from .settings import Settings, read_settings
from .speed import ExchangeTime, StepTime, exchange_time, step_time
from .work import Traffic, Work, active_parameters, chosen_experts, count_traffic, count_work

# gain from which a more complicated choice pays
_MARGIN = 0.01


@dataclass(frozen=True)
class Plan:
    """All counts and predictions of a run."""

    settings: Settings
    hardware: Hardware
    parameters: Parameters
    traffic: Traffic
    memory: Memory
    work: Work
    exchange: ExchangeTime
    time: StepTime

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU that the run may fill."""
        return self.hardware.memory - self.hardware.reserved

    @property
    def fits(self) -> bool:
        """Whether the peak fits into a GPU."""
        return self.memory.peak <= self.usable_memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.work.tokens * self.settings.gpus / self.time.total

    @property
    def flops_utilisation(self) -> float:
        """Model FLOPs per second over the peak of the hardware (MFU), 0..1."""
        peak = self.hardware.flops(self.settings.precision.element)
        return self.work.model_flops * self.work.tokens / self.time.total / peak

    @property
    def active_parameters(self) -> float:
        """Parameters that a token uses."""
        return active_parameters(self.settings, self.parameters)


def make_plan(settings: Settings, hardware: Hardware, parameters: Parameters | None = None) -> Plan:
    """Count and predict, with given counts of parameters or own ones; do not check whether it fits.

    Raises:
        ValueError: r or the placement does not fit the number of GPUs and experts.
        NotImplementedError: the exchange does not predict its time.
    """
    parameters = parameters or count_parameters(settings)
    traffic = count_traffic(settings, parameters)
    memory = count_memory(settings, parameters, make_layers(settings, parameters, traffic))
    work = count_work(settings, parameters, traffic)
    exchange = exchange_time(settings, parameters, traffic, work, hardware)
    time = step_time(settings, parameters, traffic, memory, work, exchange, hardware)
    return Plan(settings, hardware, parameters, traffic, memory, work, exchange, time)


def memory_at_peak(
    config: DictConfig, ranks: int, vocabulary: int, task: Any = None
) -> dict[str, int]:
    """Return bytes by kind that a rank needs at the peak of a step.

    Of ``NAME_moe``, which is built for the ``task``, only what its parameters decide. The random
    state of the process does not change.

    Raises:
        ValueError: the planner cannot count the run.
    """
    if is_any_model(config.model._name):
        return memory_of_model(config, ranks, task)
    settings = read_settings(config, "", gpus=ranks, vocabulary=vocabulary)
    with torch.random.fork_rng(devices=[]):
        parameters = count_parameters(settings)
    layers = make_layers(settings, parameters, count_traffic(settings, parameters))
    return count_memory(settings, parameters, layers).at_peak


def choices(plan: Plan) -> Iterator[Plan]:
    """Yield the run with every placement, r, overlap degree, and exchange that predicts its time.

    The simplest choice comes first. All choices compute the same; therefore wire formats do not
    vary.
    """
    settings = plan.settings
    if not settings.routing or settings.gpus == 1:
        yield plan  # nothing to choose
        return
    shared = settings.gpus > settings.routing.num_experts
    ways = list(itertools.product(exchange_candidates(), OVERLAP_DEGREES))
    for placement in EXPERT_PLACEMENTS if shared else EXPERT_PLACEMENTS[:1]:
        try:
            parameters = count_parameters(settings.with_placement(placement))
        except ValueError:  # hidden units do not divide, or expert groups hold whole experts
            continue
        none, *some = possible_r(parameters.groups)
        for r, (name, degree) in itertools.product((*some, none), ways):
            model = {"moe_exchange": name, "moe_overlap_degree": degree}
            chosen = settings.with_placement(placement, r).replace(model=model)
            with contextlib.suppress(NotImplementedError):  # a user's exchange without ``predict``
                yield make_plan(chosen, plan.hardware, parameters)
            if r == 0:  # without exchanges
                break


def best_plan(plan: Plan) -> Plan:
    """Return the choice with the shortest update among those that fit, or among all if none fits.

    Of the choices within 1 % of the shortest update the simplest is returned.
    """
    found = list(choices(plan))
    found = [other for other in found if other.fits] or found
    least = min(other.time.total for other in found)
    return next(other for other in found if other.time.total <= least * (1 + _MARGIN))


def largest_batch(plan: Plan) -> int:
    """Return how many sequences per GPU and forward pass fit; 0 if not one fits."""

    def fits(number):
        settings, parameters = plan.settings.replace(batch_size=number), plan.parameters
        stack = make_layers(settings, parameters, count_traffic(settings, parameters))
        return count_memory(settings, parameters, stack).peak <= plan.usable_memory

    low, high = 0, 1
    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def flop_matched(plan: Plan) -> Plan:
    """Plan a dense model of equal FLOPs per token: FFNs as wide as K experts in the MoE layers."""
    settings = plan.settings
    model = {"moe_shared_expert_ffn_dim": 0, "moe_expert_parallel_size": 0, "moe_cmr": False}
    model["moe_shared_expert_gate"] = False
    for stack, counted in zip(settings.stacks, plan.parameters.stacks, strict=True):
        if counted.moe_layers:
            beside = settings.model.moe_shared_expert_ffn_dim + stack.conditional
            width = round(chosen_experts(settings) * counted.products / (2 * stack.dim))
            model[stack.wide_option] = width + beside
    dense = settings.with_placement("replicated", 1).replace(model=model, routing=None)
    return make_plan(dense, plan.hardware)


def grown_plan(plan: Plan) -> Plan | None:
    """Plan the run after ``--moe-grow-at``; return None without that option.

    Raises:
        ValueError: the experts do not fit the ranks, or are not more than before.
    """
    settings = plan.settings
    grow_at = GrowAt.of(settings.model.moe_grow_at)
    if grow_at is None or not settings.routing:
        return None
    before, after = settings.routing.num_experts, grow_at.num_experts
    if after <= before:
        raise ValueError(f"--moe-grow-at {grow_at} makes no more of {before} experts")
    routing = replace(settings.routing, num_experts=after)
    grown = settings.replace(model={"moe_expert_count": after}, routing=routing)
    try:
        return make_plan(grown, plan.hardware)
    except ValueError as error:
        raise ValueError(f"--moe-grow-at {grow_at}: {error}") from None


def check(plan: Plan) -> None:
    """Raise ValueError if a node would be filled in part, or a GPU has too little memory."""
    check_run(plan.settings.gpus, plan.hardware, plan.memory.at_peak)


def check_run(gpus: int, hardware: Hardware, at_peak: Mapping[str, int], least: str = "") -> None:
    """Do what :func:`check` does, for bytes by kind; ``least``: words before their sum."""
    per_node, usable = hardware.gpus_per_node, hardware.memory - hardware.reserved
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"gpus={gpus} does not fill nodes of {per_node} ({hardware.title}): use "
            f"gpus={gpus // per_node * per_node} or gpus={-(-gpus // per_node) * per_node}"
        )
    peak = sum(at_peak.values())
    if peak > usable:
        largest = sorted(at_peak.items(), key=lambda kind: -kind[1])[:3]
        raise ValueError(
            f"does not fit: {least}{mib(peak)} at the peak on GPUs with {mib(usable)} to fill; "
            f"largest are " + ", ".join(f"{name} {mib(size)}" for name, size in largest)
        )


def mib(size: float) -> str:
    """Format bytes as MiB, as nvidia-smi does."""
    return f"{size / 2**20:,.0f} MiB"
