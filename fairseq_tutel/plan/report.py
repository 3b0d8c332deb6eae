"""Plans as text."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..command_line import columns
from ..config.options import as_flag
from .any_model import ModelPlan
from .balance import UTILISATIONS, help_of, rows_that_pay
from .parameters import Parameters
from .planner import Plan, flop_matched, largest_batch, mib
from .settings import Run
from .work import active_parameters, chosen_experts

_PHASES = {
    "loss": "while the loss is computed: all kept activations, and the logits",
    "backward": "in the backward pass of a layer",
    "update": "while the weights are updated",
}


# published advice for Tutel: tokens per expert below which products are too small, and experts of a
# layer above which groups of experts are worth a look
_FEW_ROWS, _MANY_EXPERTS = 128, 256


def describe(plan: Plan, tokens: float = 300e9) -> str:
    """Return a plan as lines of text, with the days of a training of ``tokens`` tokens."""
    of_parameters = _parameter_rows(plan.settings, plan.parameters)
    rows = [*of_parameters, *_memory_rows(plan), *_work_rows(plan), *_time_rows(plan)]
    rows.append((f"days for {tokens:.3g} tokens", f"{_days(plan, tokens):.3g}"))
    if plan.settings.routing:
        rows += _dense_rows(plan, tokens)
    return "\n".join([*_header(plan), *(f"  {line}" for line in columns(rows)), *advice(plan)])


def scaled(value: float, unit: str = "") -> str:
    """Return a number of three digits with a prefix; seconds keep theirs from 1 on.

    >>> scaled(0.0021, "s"), scaled(1.234e9), scaled(0, "s"), scaled(1234.5, "s")
    ('2.10 ms', '1.23 G', '0.00 s', '1234 s')
    """
    steps = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "u"}
    fitting = (size for size in steps if value >= size and (unit != "s" or size <= 1))
    size = next(fitting, 1.0)
    digits = max(0, 3 - len(str(int(value / size))))
    return f"{value / size:.{digits}f} {steps[size]}{unit}".rstrip()


def rows_per_expert(plan: Plan) -> float:
    """Return the rows of one expert, or slice of it, in a forward pass with an even load.

    They come from all GPUs that exchange rows with each other.
    """
    settings = plan.settings
    pairs = plan.traffic.exchange_ranks * settings.tokens * chosen_experts(settings)
    return pairs / settings.routing.num_experts


def advice(plan: Plan) -> list[str]:
    """Return lines of warnings and advice about the number of experts."""
    routing = plan.settings.routing
    if not routing:
        return []
    rows, lines = rows_per_expert(plan), []
    if rows < _FEW_ROWS:
        lines.append(
            f"warning: {rows:.0f} rows per expert are fewer than {_FEW_ROWS}, so that products are "
            "small: use more tokens per GPU, or fewer experts"
        )
    if routing.num_experts > _MANY_EXPERTS and not plan.settings.model.moe_expert_parallel_size:
        lines.append(
            f"advice: with more than {_MANY_EXPERTS} experts ({routing.num_experts}) try groups: "
            "tokens stay in a group of GPUs (--moe-expert-parallel-size N), or choose experts of a "
            "few groups (--moe-num-expert-groups N --moe-top-groups K)"
        )
    return lines


def _header(plan: Plan) -> list[str]:
    """Return two lines with the sizes of the planned run."""
    settings, routing = plan.settings, plan.settings.routing
    stacks = settings.stacks
    layers = " + ".join(
        f"{s.layers} {f'{s.side} ' if len(stacks) > 1 else ''}layers of {s.dim}" for s in stacks
    )
    if routing:
        widths = dict.fromkeys(stack.expert_dim for stack in stacks if stack.sparse)
        layers += f", {plan.parameters.moe_layers} with {routing.num_experts} experts of "
        layers += f"{' and '.join(map(str, widths))}, top-{routing.top_k}"
    return [
        f"{plan.parameters.total:.3g} parameters ({layers}) on {settings.gpus} ranks, "
        f"{plan.hardware.title}",
        f"{settings.precision.name}, {settings.batch_size} x {settings.tokens_per_sample} tokens "
        f"per GPU, update_freq {settings.update_freq}, vocabulary {settings.vocabulary} "
        f"({settings.name})",
    ]


def describe_model(plan: ModelPlan) -> str:
    """Return a plan of ``NAME_moe`` as lines of text, with what it cannot say."""
    settings, parameters, arch = plan.settings, plan.parameters, plan.settings.model._name
    head = f"{parameters.total:.3g} parameters of {arch} on {settings.gpus} ranks, "
    head += f"{plan.hardware.title}; {settings.precision.name}"
    memory = [(f"  {kind}", mib(size)) for kind, size in plan.at_update.items() if size]
    usable = mib(plan.hardware.memory - plan.hardware.reserved)
    together = ("  together", f"{mib(plan.least_memory)} of {usable}")
    rows = [
        *_parameter_rows(settings, parameters),
        ("memory of a GPU at least", "while the weights are updated"),
        *memory,
        together,
    ]
    notes = [
        f"not known: activations, logits, operations, traffic and time, because only the code of "
        f"{arch.removesuffix('_moe')} says what its dense layers compute",
        *(f"taken for granted: {note}" for note in plan.notes),
    ]
    return "\n".join([head, *(f"  {line}" for line in columns(rows)), *notes])


def _parameter_rows(settings: Run, parameters: Parameters) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{parameters.total:,} ({parameters.total:.2e})"),
        ("  dense", f"{parameters.dense:,}"),
    ]
    if settings.routing:
        for size in dict.fromkeys(s.expert for s in parameters.stacks if s.moe_layers):
            layers = sum(s.moe_layers for s in parameters.stacks if s.expert == size)
            rows.append(("  experts", f"{layers} layers x {parameters.experts} x {size:,}"))
        rows.append(("  active per token", f"{active_parameters(settings, parameters):,.0f}"))
    return [*rows, ("  per GPU", f"{parameters.per_gpu:,}")]


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    memory = plan.memory
    rows = [("memory of a GPU at its peak", _PHASES[memory.peak_phase])]
    rows += [(f"  {kind}", mib(size)) for kind, size in memory.at_peak.items() if size]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    rows.append(("  together", f"{mib(memory.peak)} of {mib(plan.usable_memory)}: {verdict}"))
    rows.append(("largest batch that fits", f"{largest_batch(plan)} sequences per GPU"))
    if plan.settings.model.checkpoint_activations:
        rows.append(("activations without checkpointing", mib(memory.without_checkpointing)))
    return rows


def _work_rows(plan: Plan) -> list[tuple[str, str]]:
    work, routing, rows = plan.work, plan.settings.routing, []
    if routing:
        limited = f"{work.capacity} rows per expert and GPU, top-{routing.top_k}"
        rows.append(("capacity", "unlimited" if work.capacity is None else limited))
        rows.append(("rows per expert", f"{rows_per_expert(plan):,.0f} with an even load"))
    if work.exchanges:
        sizes = f"{work.exchange_bytes / 2**20:.1f} MiB per GPU, "
        sizes += f"{work.bytes_per_peer / 2**10:.1f} KiB per peer, {work.exchanges} per update"
        rows.append(("all-to-all", sizes))
    flops = f"{scaled(work.model_flops)} (computed: {scaled(work.hardware_flops)})"
    return [*rows, ("FLOPs per token", flops)]


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    rows = [("predicted update", scaled(plan.time.total, "s"))]
    for part, seconds in dataclasses.asdict(plan.time).items():
        # weights are for expert parallelism only, the broadcast for --zero-sharding only
        if seconds or part not in ("weights", "broadcast"):
            label = f"  {part.replace('_', '-')}"
            rows.append((label, f"{scaled(seconds, 's')} ({seconds / plan.time.total:.1%})"))
    if plan.work.exchanges:
        exchange, choice = plan.exchange, plan.settings.exchange
        how = f"{choice.algorithm}, overlap degree {choice.overlap_degree}"
        hidden = f"{exchange.hidden:.0%} hidden by the experts ({how})"
        rows.append(("all-to-all on the links", f"{scaled(exchange.carried, 's')}, {hidden}"))
        if choice.balance_ranks:
            gains = [f"{help_of(plan, u).gain:.2f} at {100 * u:.0f} %" for u in UTILISATIONS]
            pays = f"pays from {rows_that_pay(plan):,} rows of a helper"
            rows.append(("gain by helping a busy GPU", f"{', '.join(gains)}; {pays}"))
    return [
        *rows,
        ("predicted tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("predicted MFU", f"{plan.flops_utilisation:.1%}"),
    ]


def _dense_rows(plan: Plan, tokens: float) -> list[tuple[str, str]]:
    """Return rows for the dense model of equal FLOPs."""
    dense = flop_matched(plan)
    options = {s.wide_option: getattr(dense.settings.model, s.wide_option)
               for s in plan.settings.stacks if s.sparse}  # fmt: skip
    as_given = as_flag if plan.settings.name == "fairseq-train" else "+model.{}={}".format
    speed = plan.tokens_per_second / dense.tokens_per_second
    return [
        ("FLOP-matched dense model", " ".join(as_given(*each) for each in options.items())),
        ("  parameters", f"{dense.parameters.total:,} ({dense.parameters.total:.2e})"),
        ("  memory of a GPU", mib(dense.memory.peak)),
        ("  predicted tokens/s", f"{dense.tokens_per_second:,.0f} (with experts {speed:.1%})"),
        (f"  days for {tokens:.3g} tokens", f"{_days(dense, tokens):.3g}"),
    ]


def _days(plan: Plan, tokens: float) -> float:
    return tokens / plan.tokens_per_second / 86400


def describe_best(plan: Plan, best: Plan, tokens: float = 300e9) -> str:
    """Return the flags of the best choice, and its plan."""
    settings, choice = best.settings, best.settings.exchange
    flags = f"--moe-exchange {choice.algorithm} --moe-overlap-degree {choice.overlap_degree}"
    if settings.routing and settings.gpus > settings.routing.num_experts:
        flags += f" --moe-expert-placement {settings.placement}"
    flags += f" --moe-parallelism-r {choice.r}"
    gain = plan.time.total / best.time.total
    return f"best of all choices: {flags}, {gain:.2f} times as fast\n{describe(best, tokens)}"


def describe_grown(plan: Plan | ModelPlan, grown: Plan | ModelPlan) -> str:
    """Return a table of what changes when a run gets more experts."""
    rows = [("", "before", "after")]
    known: list[tuple[str, Callable[[Any], str]]] = [
        ("experts", lambda p: f"{p.parameters.experts}"),
        ("parameters", lambda p: f"{p.parameters.total:,}"),
        ("  per GPU", lambda p: f"{p.parameters.per_gpu:,}"),
    ]
    if isinstance(plan, ModelPlan):
        known.append(("memory of a GPU at least", lambda p: mib(p.least_memory)))
    else:
        known += [
            ("memory of a GPU", lambda p: mib(p.memory.peak)),
            ("largest batch that fits", lambda p: f"{largest_batch(p)}"),
            ("predicted tokens/s", lambda p: f"{p.tokens_per_second:,.0f}"),
        ]
    for label, of in known:
        rows.append((label, of(plan), of(grown)))
    title = f"after --moe-grow-at {plan.settings.model.moe_grow_at}"
    return "\n".join([title, *(f"  {line}" for line in columns(rows, right=(1, 2)))])
