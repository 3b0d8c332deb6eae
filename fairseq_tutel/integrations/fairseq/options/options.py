"""Options of every fairseq model with MoE layers, and what they mean for its layers.

Names, defaults and meanings are those of fairseq's ``moe`` branch, so that its published commands
run as they are; what those options lack has new names. Differences in a default are stated in
the help text.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from ....config import (
    EXPERT_GRAD_NORMALIZATIONS,
    EXPERT_PLACEMENTS,
    EXPERTS,
    ROUTERS,
    ExchangeConfig,
    GrowAt,
    MoEConfig,
    OptionError,
)
from ....config.options import FRACTION, as_flag, at_least, check_ranges, option, with_flags
from .fields import schema_of, values_of

EXPERT_DTYPES = ("same", "bf16", "int8")


@dataclass
class MoEOptions(schema_of(ExchangeConfig, "communication"), schema_of(MoEConfig, "routing")):
    """A base of a model's dataclass: what the layer has, and what only a command line has."""

    moe_freq: int = option(
        2,
        "layer i (from 1) is an MoE layer if i is a multiple of this; 0: no MoE layers",
        at_least(0),
        group="size",
    )
    moe_expert_count: int = option(
        0,
        "experts per MoE layer over all ranks (default: the world size, one expert per rank)",
        at_least(0),
        group="size",
    )
    moe_grow_at: Optional[str] = option(
        None,
        "UPDATE:E: continue with E experts after that update, copies of the present ones; needs "
        "the launcher, which starts the ranks again",
        group="size",
    )
    moe_growth_updates: int = option(
        0,
        "> 0: --moe-grow-at keeps the model's function, and new experts come in over so many "
        "updates; needs a load bias",
        at_least(0),
        group="size",
    )
    moe_expert_ffn_dim: Optional[int] = option(
        None,
        "hidden dimension of the experts (default: that of dense layers; Meta's code ignores it)",
        at_least(1),
        group="size",
    )
    moe_expert_network: str = option(
        "ffn", "what an expert computes; gated ones have activations of their own", group="size"
    )
    moe_shared_expert_ffn_dim: int = option(
        0,
        "> 0: hidden dimension of a dense expert that all tokens go through, beside the experts "
        "that they are routed to",
        at_least(0),
        group="size",
    )

    moe_top1_expert: bool = option(False, "one expert per token, as --moe-top-k 1", group="routing")
    moe_gating_use_model_dtype: bool = option(
        False,
        "round the gate's logits to the model's dtype (turns fp32 gating off)",
        group="routing",
    )
    moe_normalize_expert_grad: ChoiceEnum(EXPERT_GRAD_NORMALIZATIONS) = option(
        "world_size",
        "divide expert gradients by the number of ranks (the true gradient) or by its square root",
        group="routing",
    )

    moe_expert_parallel_size: int = option(
        0,
        "number of neighbouring ranks that exchange tokens and together hold all experts, such as "
        "the ranks of a node; other groups hold replicas (default: as many as ranks and experts "
        "allow)",
        at_least(0),
        group="communication",
    )
    moe_expert_placement: ChoiceEnum(EXPERT_PLACEMENTS) = option(
        "replicated",
        "with fewer experts than ranks, what a rank holds of an expert: all of it ('replicated'), "
        "or a part of its hidden units ('sliced'), which takes less memory",
        group="communication",
    )
    moe_tune_steps: int = option(
        5,
        "with an 'auto': steps of each trial, the first of which is not measured",
        at_least(2),
        group="communication",
    )
    moe_tune_max_loss: float = option(
        0.02,
        "with an 'auto': part of the run's time that trials may cost",
        FRACTION,
        group="communication",
    )
    moe_tune_file: Optional[str] = option(
        None,
        "with an 'auto': take the choices from this file, such as SAVE_DIR/exchange.json of "
        "another run, and measure nothing, so that a run can be repeated bit for bit",
        group="communication",
    )

    record_a2a_perf_stats: bool = option(
        False,
        "log the time of the forward all-to-alls (synchronises each layer: slow, no overlap)",
        group="debugging",
    )
    dummy_a2a: bool = option(
        False, "leave out the all-to-alls, for benchmarks; the results are wrong", group="debugging"
    )
    moe_simulate_world_size: int = option(
        0,
        "simulate one rank of this many in one process: all-to-alls become local copies",
        at_least(0),
        group="debugging",
    )
    num_workers_valid: int = option(
        0,
        "subprocesses that load validation data (with MoE models; --num-workers in training)",
        at_least(0),
        group="debugging",
    )
    moe_backend: ChoiceEnum(("auto", "triton", "torch")) = option(
        "auto",
        "operators of the MoE layers: Triton kernels on GPUs and torch elsewhere, or one",
        group="debugging",
    )
    moe_expert_dtype: ChoiceEnum(EXPERT_DTYPES) = option(
        "same",
        "convert the experts' weights to fewer bytes, in evaluation by --model-overrides; int8 has "
        "a scale per output and runs on CPUs",
        group="debugging",
    )
    moe_map_experts: bool = option(
        False,
        "leave experts in the checkpoint's files, in evaluation by --model-overrides: each is read "
        "when the first token reaches it, once for all processes of a node",
        group="debugging",
    )
    moe_load_log_interval: int = option(
        0,
        "> 0: append load and utilisation of the experts to SAVE_DIR/expert_load.jsonl every N "
        "updates",
        at_least(0),
        group="debugging",
    )


# what the tuner may choose, by field of ExchangeConfig
_TUNED = {"algorithm": "moe_a2a", "overlap_degree": "moe_overlap_degree", "r": "moe_parallelism_r"}
# of fairseq's models
_UNSUPPORTED = (
    "base_layers",
    "scale_fc",
    "quant_noise_pq",
    "character_embeddings",
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "encoder_layerdrop",  # would drop different layers on different ranks
    "decoder_layerdrop",
    "encoder_layers_to_keep",
    "decoder_layers_to_keep",
)


def moe_frequencies(args: Any) -> tuple[int, int]:
    """Return N of encoder and decoder whose every N-th layer has experts; 0: no layer.

    N is the larger of the side's own option and ``--moe-freq``, as in Meta's branch ``moe``. More
    than the side has layers is 0. ``args``: the options of any model, or of a checkpoint, which may
    lack some; a language model has a decoder.
    """
    found = asked_frequencies(args)
    layers = [getattr(args, f"{side}_layers", None) for side in ("encoder", "decoder")]
    return tuple(
        0 if count is not None and freq > count else freq
        for freq, count in zip(found, layers, strict=True)
    )


def asked_frequencies(args: Any) -> tuple[int, int]:
    """Return :func:`moe_frequencies` without a look at the number of layers."""
    sides = [getattr(args, f"{side}_moe_freq", None) or 0 for side in ("encoder", "decoder")]
    both = getattr(args, "moe_freq", 0)
    if both is None:  # not given, where a side's may be
        both = 0 if any(sides) else 2
    return max(sides[0], both), max(sides[1], both)


def check_moe_options(args: Any, config: type) -> None:
    """Raise ValueError, with the option's name and value, for what no model with MoE layers can do.

    ``args``: the model's options, or a namespace of parsed arguments; ``config``: their dataclass,
    whose ranges are checked.
    """
    check_ranges(args, config)
    sparse = any(moe_frequencies(args))
    for name in _UNSUPPORTED:
        if sparse and getattr(args, name, None):
            flag = as_flag(name, getattr(args, name))
            raise ValueError(f"{flag} cannot be combined with MoE layers")
    EXPERTS.options_of_flags(str(args.moe_expert_network), args)
    local_drop = moe_config(args, args.moe_expert_count or 2**31).local_drop
    if local_drop and str(args.moe_expert_placement) == "sliced":
        raise ValueError(
            f"--moe-local-drop {local_drop} leaves tokens on their rank, and "
            "--moe-expert-placement sliced has parts of experts there: give one of them"
        )
    exchange_config(args)
    expert_storage(args)
    tuned_fields(args)
    GrowAt.of(args.moe_grow_at)


def moe_config(args: Any, num_experts: int) -> MoEConfig:
    """Return how tokens are routed; raise ValueError for options that contradict each other."""
    values = values_of(MoEConfig, args)
    _resolve_capacity(values, args.moe_top1_expert)
    if num_experts == 1:
        values.setdefault("top_k", 1)  # the default of 2 means one expert where there is only one
    if args.moe_gating_use_model_dtype:
        if values.get("gating_fp32"):
            raise ValueError(
                "--moe-gating-use-fp32 and --moe-gating-use-model-dtype contradict each other"
            )
        values["gating_fp32"] = False
    router_options = ROUTERS.options_of_flags(values["router"], args)
    try:
        return MoEConfig(num_experts, **values, router_options=router_options)
    except OptionError as error:
        raise ValueError(with_flags(error.text, MoEConfig)) from None


def _resolve_capacity(values: dict[str, Any], top1_expert: bool) -> None:
    """Put Meta's vocabulary for K and for the evaluation capacity into that of MoEConfig."""
    if top1_expert and values.setdefault("top_k", 1) != 1:
        raise ValueError(
            f"--moe-top1-expert and --moe-top-k {values['top_k']} contradict each other: give one "
            "of them"
        )
    fraction = values.get("eval_capacity_token_fraction")
    if fraction is None:
        return
    if "eval_capacity_factor" in values:
        raise ValueError(
            f"--moe-eval-capacity-token-fraction {fraction} and --moe-eval-capacity-factor "
            f"{values['eval_capacity_factor']} both set the evaluation capacity: give one of them"
        )
    if fraction <= 0:  # its 2021 meaning: evaluate with the training formula
        del values["eval_capacity_token_fraction"]
        values["eval_capacity_factor"] = values.get("capacity_factor", MoEConfig.capacity_factor)


def exchange_config(args: Any) -> ExchangeConfig:
    """Return how tokens travel between ranks; raise ValueError for options that contradict."""
    values = values_of(ExchangeConfig, args)
    placement, r = str(args.moe_expert_placement), values["r"]
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
    return ExchangeConfig(**values)


def expert_storage(args: Any) -> str:
    """``expert_storage`` of the layers; raises ValueError for what contradicts."""
    # a model of one's own may lack them
    dtype = str(getattr(args, "moe_expert_dtype", "same"))
    mapped = getattr(args, "moe_map_experts", False)
    if dtype != "same" and mapped:
        raise ValueError(
            f"--moe-expert-dtype {dtype} converts the experts, and --moe-map-experts leaves them "
            "in their files: give one of them"
        )
    storage = "mapped" if mapped else "stacked" if dtype == "same" else dtype
    if storage != "stacked" and str(args.moe_expert_placement) == "sliced":
        raise ValueError(
            f"experts that are held as {storage} are whole, and --moe-expert-placement sliced cuts "
            "them: give one of them"
        )
    return storage


def refuse_in_training(args: Any) -> None:
    """Raise ValueError for what holds in evaluation alone."""
    if expert_storage(args) != "stacked":
        given = "--moe-map-experts"
        if not args.moe_map_experts:
            given = as_flag("moe_expert_dtype", args.moe_expert_dtype)
        raise ValueError(
            f"{given} is for evaluation: train without it, and give it to --model-overrides or "
            "from_pretrained"
        )


def tuned_fields(args: Any) -> list[str]:
    """Fields of :class:`~fairseq_tutel.config.ExchangeConfig` that the tuner chooses. Raises
    ValueError for options that cannot be combined with it, each by name.
    """
    tuned = [field for field, flag in _TUNED.items() if str(getattr(args, flag)) == "auto"]
    if not tuned:
        if args.moe_tune_file is not None:
            choices = " or ".join(as_flag(flag, "auto") for flag in _TUNED.values())
            raise ValueError(
                f"--moe-tune-file {args.moe_tune_file}: nothing is tuned; give {choices}"
            )
        return []
    autos = " and ".join(as_flag(_TUNED[field], "auto") for field in tuned)
    simulated = args.moe_simulate_world_size
    for flag, on in (
        ("--record-a2a-perf-stats, which measures without overlap", args.record_a2a_perf_stats),
        ("--dummy-a2a, which leaves out what is tuned", args.dummy_a2a),
        (f"--moe-simulate-world-size {simulated}, which exchanges nothing", simulated > 1),
    ):
        if on:
            raise ValueError(f"{autos} cannot be combined with {flag}")
    return tuned
