"""Plans as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .planner import GB, Plan, with_best_exchange


def describe(plan: Plan) -> str:
    """One plan as lines of text."""
    settings, parameters, memory = plan.settings, plan.parameters, plan.memory
    lines = [
        f"{settings.name}: {settings.gpus} ranks, {plan.hardware.title}",
        f"{settings.precision.name}, {settings.batch_size} x {settings.tokens_per_sample} tokens "
        f"per GPU, update_freq {settings.update_freq}, vocabulary {settings.vocabulary}",
    ]
    if settings.is_dense_formulation:
        spread = ", dense parameters fully sharded" if settings.is_fully_sharded else ""
        lines.append(f"as fairseq's moe branch computes: dense masks and scores{spread}")
    rows: list[tuple[str, str]] = [
        ("parameters", f"{parameters.total:,} ({parameters.total:.2e})"),
        ("  dense", f"{parameters.dense:,}"),
    ]
    if settings.routing:
        rows.append(
            (
                "  experts",
                f"{parameters.moe_layers} layers x {parameters.experts} x {parameters.expert:,}",
            )
        )
    rows.append(("  per GPU", f"{parameters.per_gpu:,}"))
    rows += [(label, f"{size / GB:8.2f} GB") for label, size in memory_rows(plan)]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    rows.append(
        (
            "peak",
            f"{memory.peak / GB:8.2f} GB ({memory.peak_phase}); {plan.usable_memory / GB:.1f} GB "
            f"to fill: {verdict}",
        )
    )
    return "\n".join(lines + _columns(rows + _work_rows(plan)))


def memory_rows(plan: Plan) -> list[tuple[str, int]]:
    """(kind, bytes) of the memory of one GPU."""
    memory, checkpointing = plan.memory, plan.settings.model.checkpoint_activations
    other = "without" if checkpointing else "no"
    rows = [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("fp32 copies", memory.master),
        ("optimizer statistics", memory.optimizer),
        ("activations", memory.activations),
        ("dispatch buffers", memory.dispatch),
        ("logits", memory.logits),
        ("working set of a layer", memory.working),
        ("all-reduce buffer", memory.communication),
        (f"({other} checkpointing: activations)", memory.without_checkpointing),
    ]
    return [(label, size) for label, size in rows if size]


def _work_rows(plan: Plan) -> list[tuple[str, str]]:
    work, time, settings = plan.work, plan.time, plan.settings
    rows = []
    if settings.routing:
        rows.append(
            (
                "capacity",
                "unlimited"
                if work.capacity is None
                else f"{work.capacity} rows per expert and GPU, top-{settings.routing.top_k}",
            )
        )
    if work.exchanges:
        rows += [
            (
                "all-to-all",
                f"{work.exchange_bytes / 2**20:.1f} MiB per GPU, "
                f"{work.bytes_per_peer / 2**10:.1f} KiB per peer, {work.exchanges} per update",
            ),
            ("  leaving a GPU", f"{work.exchange_bytes_per_update / GB:.2f} GB per update"),
        ]
    rows += [
        (
            "FLOPs per token",
            f"{work.model_flops / 1e9:.2f} G (computed: {work.hardware_flops / 1e9:.2f} G)",
        ),
        ("predicted update", f"{time.total:.3f} s"),
    ]
    for label, seconds in time_rows(plan):
        rows.append((f"  {label}", f"{seconds:.3f} s ({seconds / time.total:.1%})"))
    if work.exchanges:
        rows += _exchange_rows(plan)
    rows += [
        ("predicted tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("predicted MFU", f"{plan.flops_utilisation:.1%}"),
    ]
    return rows


def _exchange_rows(plan: Plan) -> list[tuple[str, str]]:
    exchange, best = plan.exchange, with_best_exchange(plan)
    return [
        (
            "all-to-all on the links",
            f"{exchange.carried:.3f} s, {exchange.hidden:.0%} hidden by the experts "
            f"({choice_name(plan)})",
        ),
        ("  least exposed", f"{best.exchange.exposed:.3f} s with {choice_name(best)}"),
    ]


def choice_name(plan: Plan) -> str:
    """Algorithm and overlap degree, as in "2dh x4"."""
    choice = plan.settings.exchange
    return f"{choice.algorithm} x{choice.overlap_degree}"


def time_rows(plan: Plan) -> list[tuple[str, float]]:
    """(part, seconds) of an update."""
    return [(key.replace("_", "-"), value) for key, value in dataclasses.asdict(plan.time).items()]


def table(plans: Sequence[Plan]) -> str:
    """The ladder as a Markdown table."""
    head = (
        "gpus",
        "experts",
        "parameters",
        "per GPU",
        "memory GB",
        "fits",
        "capacity",
        "a2a MiB",
        "KiB per peer",
        "step s",
        "tokens/s",
        "a2a share",
        "MFU",
        "best exchange",
        "tokens/s with it",
    )
    rows = [head, tuple("-" * len(name) for name in head)]
    for plan in plans:
        work, best = plan.work, with_best_exchange(plan)
        rows.append(
            (
                str(plan.settings.gpus),
                str(plan.parameters.experts or "-"),
                f"{plan.parameters.total:.3e}",
                f"{plan.parameters.per_gpu:.3e}",
                f"{plan.memory.peak / GB:.1f}",
                "yes" if plan.fits else "no",
                "-" if work.capacity is None else str(work.capacity),
                f"{work.exchange_bytes / 2**20:.0f}",
                f"{work.bytes_per_peer / 2**10:.0f}",
                f"{plan.time.total:.2f}",
                f"{plan.tokens_per_second:,.0f}",
                f"{plan.time.all_to_all_share:.1%}",
                f"{plan.flops_utilisation:.1%}",
                choice_name(best),
                f"{best.tokens_per_second:,.0f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def as_dict(plan: Plan) -> dict[str, Any]:
    """Every number of a plan, for JSON."""
    settings, parameters = plan.settings, plan.parameters
    return {
        "config": settings.name,
        "gpus": settings.gpus,
        "hardware": plan.hardware.title,
        "formulation": settings.formulation,
        "exchange": dataclasses.asdict(settings.exchange),
        "precision": settings.precision.name,
        "batch_size": settings.batch_size,
        "tokens_per_sample": settings.tokens_per_sample,
        "update_freq": settings.update_freq,
        "vocabulary": settings.vocabulary,
        "parameters": {
            **dataclasses.asdict(parameters),
            "total": parameters.total,
            "per_gpu": parameters.per_gpu,
        },
        "memory_bytes": {
            **dataclasses.asdict(plan.memory),
            "peak": plan.memory.peak,
            "usable": plan.usable_memory,
        },
        "fits": plan.fits,
        "work": {**dataclasses.asdict(plan.work), "bytes_per_peer": plan.work.bytes_per_peer},
        "predicted_exchange": {
            **dataclasses.asdict(plan.exchange),
            "hidden": plan.exchange.hidden,
            "best": dataclasses.asdict(with_best_exchange(plan).settings.exchange),
        },
        "predicted_seconds": {**dataclasses.asdict(plan.time), "total": plan.time.total},
        "predicted_tokens_per_second": plan.tokens_per_second,
        "predicted_all_to_all_share": plan.time.all_to_all_share,
        "predicted_flops_utilisation": plan.flops_utilisation,
    }


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"  {label.ljust(width)}  {value}" for label, value in rows]
