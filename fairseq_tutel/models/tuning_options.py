"""Options of the tuner, which chooses the exchange while training, and what they contradict."""

# no postponed annotations here: fairseq reads the types of dataclass fields
from dataclasses import dataclass
from typing import Optional

from ..hosts import ExchangeTuner
from ..ranges import Range, at_least
from .option_fields import option


@dataclass
class TuningOptions:
    """What is tried while training, and at what cost."""

    moe_tune_steps: int = option(
        5,
        "with an 'auto': steps of each trial, the first of which is not measured",
        at_least(2),
    )
    moe_tune_max_loss: float = option(
        0.02,
        "with an 'auto': part of the run's time that trials may cost",
        Range(0, 1),
    )
    moe_tune_file: Optional[str] = option(
        None,
        "with an 'auto': take the choices of this file, as SAVE_DIR/exchange.json of another run, "
        "and measure nothing, so that a run can be repeated bit for bit",
    )


def tuned_fields(args) -> list[str]:
    """Fields of :class:`~fairseq_tutel.config.ExchangeConfig` that the tuner chooses.

    The algorithm is tuned beside the others only: by itself ``--moe-a2a auto`` is chosen by the
    size of the message, as measured once at the start.

    Raises:
        ValueError: what cannot be combined with it; each is named.
    """
    fields, flags = [], []
    for field, name in (("overlap_degree", "moe_overlap_degree"), ("r", "moe_parallelism_r")):
        if str(getattr(args, name)) == "auto":
            fields.append(field)
            flags.append(f"--{name.replace('_', '-')} auto")
    if not fields:
        if args.moe_tune_file is not None:
            raise ValueError(
                f"--moe-tune-file {args.moe_tune_file}: nothing is tuned; give "
                "--moe-overlap-degree auto or --moe-parallelism-r auto"
            )
        return []
    for flag, on in (
        ("--record-a2a-perf-stats, which measures without overlap", args.record_a2a_perf_stats),
        ("--dummy-a2a, which leaves out what is tuned", args.dummy_a2a),
        (
            f"--moe-simulate-world-size {args.moe_simulate_world_size}, which exchanges nothing",
            args.moe_simulate_world_size > 1,
        ),
    ):
        if on:
            raise ValueError(f"{' and '.join(flags)} cannot be combined with {flag}")
    return (["algorithm"] if str(args.moe_a2a) == "auto" else []) + fields


def make_tuner(args, layers) -> Optional[ExchangeTuner]:
    """The tuner of a model's layers, None where nothing is to be chosen. Collective.

    Raises:
        ValueError: the file cannot be read, or is not for this run.
    """
    fields = tuned_fields(args)
    if not fields or not layers or not layers[0].groups.agrees:
        return None
    path, pinned = args.moe_tune_file, None
    try:
        if path is not None:
            with open(path, encoding="utf-8") as file:
                pinned = file.read()
        return ExchangeTuner(
            layers,
            fields,
            steps=args.moe_tune_steps,
            max_loss=args.moe_tune_max_loss,
            pinned=pinned,
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--moe-tune-file {path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"--moe-tune-file {path}: {error}" if pinned else str(error)) from None
