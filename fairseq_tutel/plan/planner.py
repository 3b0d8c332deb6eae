"""A plan: counts, memory, work and time of a run on some hardware, or the reason it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .exchange import ExchangeTime, exchange_time
from .hardware import Hardware
from .memory import Memory, count_memory
from .parameters import Parameters, count_parameters
from .settings import Settings, with_experts
from .speed import StepTime, predict
from .work import Work, count_work

GB = 1e9
LADDER = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ImpossiblePlan(ValueError):
    """A run that cannot be; the message names the reason and what to change."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    settings: Settings
    hardware: Hardware
    parameters: Parameters
    memory: Memory
    work: Work
    time: StepTime
    exchange: ExchangeTime

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU that the run may fill."""
        return self.hardware.memory - self.hardware.reserved

    @property
    def fits(self) -> bool:
        """Whether the peak fits."""
        return self.memory.peak <= self.usable_memory

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.work.tokens * self.settings.gpus / self.time.total

    @property
    def flops_utilisation(self) -> float:
        """Model FLOPs per second over the peak of the hardware (MFU), 0..1."""
        half = self.settings.precision.element == 2
        peak = self.hardware.half_flops if half else self.hardware.fp32_flops
        return self.work.model_flops * self.work.tokens / self.time.total / peak


def make_plan(settings: Settings, hardware: Hardware, parameters: Parameters | None = None) -> Plan:
    """Count and predict; does not ask whether the run fits.

    Args:
        parameters: as :func:`count_parameters` counts them for these settings, if they are known.

    Raises:
        ValueError: r or the placement is none of this number of GPUs and experts.
    """
    parameters = parameters or count_parameters(settings)
    memory = count_memory(settings, parameters)
    work = count_work(settings, parameters)
    time = predict(settings, parameters, memory, work, hardware)
    exchange = exchange_time(settings, parameters, work, hardware)
    return Plan(settings, hardware, parameters, memory, work, time, exchange)


def check(plan: Plan) -> None:
    """Refuse a plan that cannot run.

    Raises:
        ImpossiblePlan: a part of a node beyond the first, or more memory than a GPU has.
    """
    gpus, per_node = plan.settings.gpus, plan.hardware.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise ImpossiblePlan(
            f"gpus={gpus} does not fill nodes of {per_node} ({plan.hardware.title}): use "
            f"gpus={gpus // per_node * per_node} or gpus={-(-gpus // per_node) * per_node}"
        )
    if plan.fits:
        return
    memory = plan.memory
    need, have = memory.peak / GB, plan.usable_memory / GB
    kinds = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "fp32 copies": memory.master,
        "optimizer statistics": memory.optimizer,
        "activations and dispatch buffers": memory.activations + memory.dispatch,
        "logits": memory.logits,
    }
    largest = sorted(kinds.items(), key=lambda kind: -kind[1])[:3]
    shares = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in largest)
    raise ImpossiblePlan(
        f"does not fit: {need:.1f} GB at the peak ({memory.peak_phase}) on GPUs with {have:.1f} GB "
        f"to fill; largest are {shares}. {_advice(plan)}"
    )


def _advice(plan: Plan) -> str:
    """Single changes that bring the peak down, those that suffice first."""
    found = []
    for knob, changed in _knobs(plan.settings):
        peak = count_memory(changed, count_parameters(changed)).peak
        if peak < plan.memory.peak:
            found.append((peak > plan.usable_memory, peak, knob))
    enough = [f"{knob} ({peak / GB:.1f} GB)" for over, peak, knob in sorted(found) if not over]
    if enough:
        return f"Each of these alone makes it fit: {'; '.join(enough)}"
    if not found:
        return "No single setting lowers it: use a smaller model or GPUs with more memory"
    helping = "; ".join(f"{knob} ({peak / GB:.1f} GB)" for _, peak, knob in sorted(found)[:4])
    return f"No single setting suffices; these help: {helping}"


def _knobs(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Changes of one setting (or of one with its counterpart) that keep the run's meaning."""
    precision = settings.precision
    if not settings.model.checkpoint_activations:
        yield (
            "model.checkpoint_activations=true",
            settings.replace(model={"checkpoint_activations": True}),
        )
    if precision.statistic == 4:
        yield "optimizer.fp16_adam_stats=true", _with_precision(settings, statistic=2)
    if precision.element == 4:
        yield (
            "common.fp16=true common.memory_efficient_fp16=true",
            _with_precision(settings, element=2),
        )
    if precision.master_copies:
        yield (
            f"common.memory_efficient_{precision.name}=true",
            _with_precision(settings, master_copies=False),
        )
    if settings.batch_size > 1:
        half = settings.batch_size // 2
        yield (
            f"dataset.batch_size={half} optimization.update_freq=[{settings.update_freq * 2}]",
            settings.replace(batch_size=half, update_freq=settings.update_freq * 2),
        )
    if settings.routing and settings.routing.num_experts > settings.gpus:
        experts = settings.routing.num_experts
        yield f"model.moe_expert_count={settings.gpus}", with_experts(settings, settings.gpus)
        yield f"gpus={experts}", settings.replace(gpus=experts)
    if settings.routing and settings.model.moe_expert_parallel_size:
        size = 2 * settings.exchange_peers
        while settings.gpus % size == 0 == settings.routing.num_experts % size:
            yield (
                f"model.moe_expert_parallel_size={size}",
                settings.replace(model={"moe_expert_parallel_size": size}),
            )
            size *= 2
    elif settings.routing and settings.routing.num_experts < settings.gpus:
        holders = settings.gpus // settings.routing.num_experts
        whole = settings.placement == "replicated" and not settings.is_dense_formulation
        if whole and settings.model.moe_expert_ffn_dim % holders == 0:
            yield "placement=sliced", settings.with_flow("sliced", settings.exchange.r)


def _with_precision(settings: Settings, **changes) -> Settings:
    return settings.replace(
        precision=type(settings.precision)(**{**vars(settings.precision), **changes})
    )


def ladder(settings: Settings, hardware: Hardware, *, experts: int | None) -> list[Plan]:
    """Plans for 8 to 4096 GPUs.

    Args:
        experts: of every rung; one per GPU if None.

    Raises:
        ValueError: experts and GPUs of a rung do not divide, or its routing cannot be.
    """
    plans = []
    for gpus in LADDER:
        if gpus > hardware.gpus_per_node and gpus % hardware.gpus_per_node:
            continue
        try:
            rung = with_experts(settings.replace(gpus=gpus), experts or gpus)
        except ValueError as error:
            own = "" if experts else ", of one expert per GPU (model.moe_expert_count=N: others)"
            raise ValueError(f"the rung of {gpus} GPUs{own}: {error}") from None
        plans.append(make_plan(rung, hardware))
    return plans
