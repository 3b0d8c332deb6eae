"""Plans as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .choose import with_best_exchange
from .planner import GB, Plan


def describe(plan: Plan, best: Plan | None = None) -> str:
    """One plan as lines of text, and what a better one does about it."""
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
    if settings.routing and settings.model.moe_expert_parallel_size:
        peers = settings.exchange_peers
        rows.append(
            (
                "  expert groups",
                f"{settings.gpus // peers} of {peers} GPUs, {parameters.local_experts} experts "
                "of a layer on each",
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
    rows += _work_rows(plan)
    if best is not None:
        gain = plan.time.total / best.time.total
        rows += [
            ("best of all choices", choice_words(best)),
            ("  predicted update", f"{best.time.total:.3f} s, {gain:.2f} times as fast"),
            ("  because", reasons(plan, best)),
        ]
    return "\n".join(lines + _columns(rows))


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
        ("  gathered weights of its experts", memory.gathered),
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
        if label == "weights" and not seconds:
            continue  # only r-flow has it
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
    """Algorithm and overlap degree, placement and r unless default: "2dh x4 sliced r=2"."""
    settings, choice = plan.settings, plan.settings.exchange
    name = f"{choice.algorithm} x{choice.overlap_degree}"
    if settings.placement != "replicated":
        name += f" {settings.placement}"
    if choice.r != 1:
        name += f" r={choice.r}"
    return name


def choice_words(plan: Plan) -> str:
    """The same as this command's keys."""
    settings, choice = plan.settings, plan.settings.exchange
    words = f"exchange={choice.algorithm} overlap={choice.overlap_degree}"
    if settings.routing and settings.gpus > 1:
        words += f" placement={settings.placement} r={choice.r}"
    return words


def reasons(plan: Plan, best: Plan) -> str:
    """What another plan does in less time or memory, and what in more."""
    changes = ["it fits"] if best.fits and not plan.fits else []
    for (name, before), (_, after) in zip(time_rows(plan), time_rows(best), strict=True):
        if abs(after - before) >= 0.001 * plan.time.total:
            changes.append(f"{name} {before:.3f} -> {after:.3f} s")
    before, after = (f"{p.memory.peak / GB:.1f}" for p in (plan, best))
    if before != after:
        changes.append(f"memory {before} -> {after} GB")
    return ", ".join(changes) or "nothing is faster"


def time_rows(plan: Plan) -> list[tuple[str, float]]:
    """(part, seconds) of an update."""
    return [(key.replace("_", "-"), value) for key, value in dataclasses.asdict(plan.time).items()]


def table(plans: Sequence[Plan], best: Sequence[Plan] | None = None) -> str:
    """The ladder as a Markdown table.

    Args:
        best: of every rung; that with the best exchange if None.
    """
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
        "best exchange" if best is None else "best choice",
        "tokens/s with it",
        *(["because"] if best is not None else []),
    )
    rows = [head, tuple("-" * len(name) for name in head)]
    for number, plan in enumerate(plans):
        work = plan.work
        chosen = best[number] if best is not None else with_best_exchange(plan)
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
                choice_name(chosen),
                f"{chosen.tokens_per_second:,.0f}",
                *([reasons(plan, chosen)] if best is not None else []),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def as_dict(plan: Plan, best: Plan | None = None) -> dict[str, Any]:
    """Every number of a plan, for JSON, and of a better one under "best"."""
    settings, parameters = plan.settings, plan.parameters
    better = {} if best is None else {"best": {**as_dict(best), "because": reasons(plan, best)}}
    return {
        "config": settings.name,
        "gpus": settings.gpus,
        "hardware": plan.hardware.title,
        "formulation": settings.formulation,
        "exchange": dataclasses.asdict(settings.exchange),
        "placement": settings.placement,
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
        **better,
    }


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"  {label.ljust(width)}  {value}" for label, value in rows]
