"""Options of the exchange between ranks and their translation into an :class:`ExchangeConfig`."""

# no postponed annotations here: fairseq reads the types of dataclass fields
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from ..config import EXPERT_PLACEMENTS, WIRES, ExchangeConfig
from ..ranges import Range, at_least, ranges_of
from .option_fields import option

_EXCHANGE = ranges_of(ExchangeConfig)


@dataclass
class ExchangeOptions:
    """How tokens travel between ranks."""

    # its choices and help: see registered.py
    moe_a2a: str = option("linear", "how tokens travel between ranks")
    moe_expert_parallel_size: int = option(
        0,
        "ranks, neighbours, that exchange tokens and hold all experts between them, such as those "
        "of a node; other such groups hold replicas (default: as many as ranks and experts allow)",
        at_least(0),
    )
    moe_expert_placement: ChoiceEnum(EXPERT_PLACEMENTS) = option(
        "replicated",
        "what each of several ranks that share an expert holds: all of it ('replicated'), or a "
        "part of its hidden units ('sliced'), which takes as many times less memory",
    )
    # texts for their 'auto'
    moe_parallelism_r: str = option(
        "1",
        "ranks that each token of an expert goes to, of those that hold a part of it: they gather "
        "what they lack of the weights; a divisor of their number; 0: tokens stay where they are, "
        "and every rank gathers all experts; 'auto': tried and measured while training",
    )
    moe_ranks_per_node: int = option(
        0,
        "ranks that share a node, for hierarchical all-to-alls (default: as found)",
        _EXCHANGE["ranks_per_node"],
    )
    moe_overlap_degree: str = option(
        "1",
        "chunks (1, 2, 4 or 8) in which tokens travel to the experts and back, so that one is "
        "computed while others travel; pays where that takes about as long as the experts; 'auto': "
        "tried and measured while training (with an 'auto' of either, --moe-a2a auto, too)",
    )
    moe_wire: ChoiceEnum(WIRES) = option(
        "same",
        "how tokens are written on their way to other ranks: 'same': as they are; 'bf16'; 'fp16' "
        "and 'fp8': with a scale per 128 values, so that nothing overflows; where that is narrower",
    )
    moe_wire_back: ChoiceEnum(("auto", *WIRES)) = option(
        "auto", "the same for experts' outputs; 'auto': as --moe-wire, but bf16 where that is fp8"
    )
    moe_wire_grad: ChoiceEnum(("auto", *WIRES)) = option(
        "auto", "the same for gradients, both ways ('fp8' is e5m2 there, e4m3 elsewhere)"
    )
    moe_wire_compact: bool = option(
        False,
        "with a capacity in training, only the rows in use travel and are computed; the host waits "
        "for the counts of each layer",
    )
    record_a2a_perf_stats: bool = option(
        False, "log the time of the forward all-to-alls (synchronises each layer: slow, no overlap)"
    )
    dummy_a2a: bool = option(
        False, "leave out the all-to-alls, for benchmarks; the results are wrong"
    )
    moe_simulate_world_size: int = option(
        0,
        "simulate one rank of this many in one process: all-to-alls become local copies",
        at_least(0),
    )


def exchange_config(args) -> ExchangeConfig:
    """How tokens travel between ranks, of a model config (or argparse namespace).

    Raises:
        ValueError: a value that there is not, or options that contradict each other.
    """
    placement = str(args.moe_expert_placement)
    r = _number("--moe-parallelism-r", args.moe_parallelism_r, _EXCHANGE["r"])
    if placement == "sliced" and args.moe_expert_parallel_size:
        raise ValueError(
            f"--moe-expert-parallel-size {args.moe_expert_parallel_size} makes groups of ranks "
            "that hold whole experts, and --moe-expert-placement sliced cuts them: give one of them"
        )
    if placement == "replicated" and r > 1:
        raise ValueError(
            f"--moe-parallelism-r {r} sends a token to {r} ranks that have a part each of its "
            "expert, and --moe-expert-placement replicated has none: give --moe-expert-placement "
            "sliced, or an r of 0 or 1"
        )
    return ExchangeConfig(
        algorithm=str(args.moe_a2a),
        ranks_per_node=args.moe_ranks_per_node,
        wire=str(args.moe_wire),
        wire_back=str(args.moe_wire_back),
        wire_grad=str(args.moe_wire_grad),
        wire_compact=args.moe_wire_compact,
        overlap_degree=_number(
            "--moe-overlap-degree", args.moe_overlap_degree, _EXCHANGE["overlap_degree"]
        ),
        r=r,
    )


def _number(flag: str, given: Any, allowed: Range) -> int:
    """A number, or 1 where the tuner chooses it: there it begins."""
    text = str(given)
    if text == "auto":
        return 1
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{flag} {text} must be a whole number, or auto") from None
    objection = allowed.objection([number])
    if objection:
        raise ValueError(f"{flag} {text} {objection}, or auto")
    return number
