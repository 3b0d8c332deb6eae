"""Options of every fairseq model with MoE layers, and the frozen value that they become.

Names, defaults and meanings are those of fairseq's ``moe`` branch; help texts state other defaults.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
import functools
import logging
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from ....config import (
    EXPERT_GRAD_NORMALIZATIONS,
    EXPERT_PLACEMENTS,
    PRESETS,
    ExchangeConfig,
    ExpertConfig,
    GrowAt,
    MoEConfig,
    OptionError,
    with_preset,
)
from ....config.options import FRACTION, above, as_flag, at_least, check_ranges, option, with_flags
from . import benchmark
from .benchmark import Benchmark, benchmark_of
from .bundles import BUNDLES, expand
from .fields import CONFIGS, TUNED, schema_of, use_present_names, values_of
from .held_experts import EXPERT_DTYPES, expert_storage

logger = logging.getLogger(__name__)

# options by the group of the help in which they stand
_size, _routing, _balance, _communication, _debugging = (
    functools.partial(option, group=group)
    for group in ("size", "routing", "balance", "communication", "debugging")
)
_AUTOS = [f"{flag}=auto" for flag in TUNED.values()]


def _bundle(make: Any, name: str) -> Any:
    return make(None, f"KEY=VALUE,... {BUNDLES[name].about}")


@dataclass
class MoEOptions(
    schema_of(ExchangeConfig), schema_of(MoEConfig), schema_of(ExpertConfig), benchmark.FormerFlags
):
    """Base of a model's dataclass: the layers' options, and those of a training run."""

    moe_lora_rank: int = _size(
        0,
        "> 0: train only low-rank updates of this rank (LoRA) of the experts' weights",
        at_least(0),
    )
    moe_lora_alpha: float = _size(
        16.0, "factor of the LoRA updates, divided by the rank", above(0), needs=["moe_lora_rank"]
    )
    moe_freq: int = _size(2, "every N-th layer is an MoE layer; 0: none", at_least(0))
    moe_expert_count: int = _size(
        0,
        "experts per MoE layer over all ranks (default: the world size, one expert per rank)",
        at_least(0),
    )
    moe_expert_network_options: Optional[str] = _bundle(_size, "moe_expert_network_options")
    moe_grow_at: Optional[str] = _size(
        None, "UPDATE:E: continue with E experts after that update; not with Hydra"
    )
    moe_expert_ffn_dim: Optional[int] = _size(
        None,
        "hidden dimension of the experts (default: that of dense layers; Meta's code ignores it)",
        at_least(1),
    )

    moe_router_options: Optional[str] = _bundle(_routing, "moe_router_options")
    moe_gate_loss_options: Optional[str] = _bundle(_balance, "moe_gate_loss_options")
    moe_preset: ChoiceEnum(tuple(PRESETS)) = _routing(
        "meta",
        "values of options that are not given: 'meta': as Meta's code; 'balanced': dropless, with"
        " a load bias and a small gate loss (recommended)",
    )
    moe_top1_expert: bool = option(False, "former name of --moe-top-k 1")
    moe_gating_use_model_dtype: bool = _routing(
        False, "round the gate's logits to the model's dtype (turns fp32 gating off)"
    )
    moe_normalize_expert_grad: ChoiceEnum(EXPERT_GRAD_NORMALIZATIONS) = _routing(
        "world_size",
        "divide expert gradients by the number of ranks (true gradient) or its square root",
    )

    moe_expert_parallel_size: int = _communication(
        0,
        "neighbouring ranks that together hold all experts (default: as many as ranks and experts"
        " allow)",
        at_least(0),
    )
    moe_expert_placement: ChoiceEnum(EXPERT_PLACEMENTS) = _communication(
        "replicated", "with fewer experts than ranks, a rank holds a whole expert or a slice"
    )
    moe_wire_options: Optional[str] = _bundle(_communication, "moe_wire_options")
    moe_balance_options: Optional[str] = _bundle(_communication, "moe_balance_options")
    moe_tune_options: Optional[str] = _bundle(_communication, "moe_tune_options")
    moe_tune_steps: int = _communication(
        5,
        "steps of a trial in round two; each later round has twice as many",
        at_least(2),
        needs=_AUTOS,
    )
    moe_tune_max_loss: float = _communication(
        0.02, "share of the run's time that trials may cost", FRACTION, needs=_AUTOS
    )
    moe_tune_file: Optional[str] = _communication(
        None, "SAVE_DIR/exchange.json of another run, with the choices for an 'auto'"
    )

    moe_benchmark: Optional[str] = _debugging(None, benchmark.HELP, const=benchmark.ALONE)
    num_workers_valid: int = _debugging(0, "subprocesses that load validation data", at_least(0))
    moe_backend: ChoiceEnum(("auto", "triton", "torch")) = _debugging(
        "auto", "operators of MoE layers; 'auto': Triton kernels on GPUs, torch elsewhere"
    )
    moe_expert_dtype: ChoiceEnum(EXPERT_DTYPES) = _debugging(
        "same",
        "dtype of experts in evaluation, by --model-overrides (int8: CPUs only); of frozen "
        "weights with --moe-lora-rank",
    )
    moe_map_experts: bool = _debugging(
        False,
        "in evaluation, by --model-overrides: read experts from the checkpoint's files when needed",
    )
    moe_load_log_interval: int = _debugging(
        0,
        "> 0: append the experts' load to SAVE_DIR/expert_load.jsonl every N updates",
        at_least(0),
    )
    moe_trace: Optional[str] = _debugging(
        None,
        "folder for the experts of every token, in training and validation; in evaluation by "
        "--model-overrides",
    )
    moe_trace_interval: int = _debugging(
        1, "in training, --moe-trace writes every N-th update", at_least(1), needs=["moe_trace"]
    )


@dataclass(frozen=True)
class RunOptions:
    """All that a model's MoE layers are built from. :func:`run_options` makes it once per model."""

    args: Any  # the model's options
    routing: MoEConfig
    exchange: ExchangeConfig
    experts: ExpertConfig
    storage: str  # expert_storage of the layers
    tuned: tuple[str, ...]  # fields of ExchangeConfig that the tuner chooses
    benchmark: Benchmark


# options of fairseq's models
_UNSUPPORTED = (
    *("base_layers", "scale_fc", "quant_noise_pq"),
    *("character_embeddings", "adaptive_input", "adaptive_softmax_cutoff"),
    # would drop different layers on different ranks
    *("encoder_layerdrop", "decoder_layerdrop"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep"),
)


def moe_frequencies(args: Any) -> tuple[int, int]:
    """Return N for encoder and decoder: every N-th layer has experts; 0: no layer has.

    An N larger than the side's number of layers becomes 0. ``args`` may lack some of the options.
    """
    found = asked_frequencies(args)
    layers = [getattr(args, f"{side}_layers", None) for side in ("encoder", "decoder")]
    return tuple(
        0 if isinstance(count, int) and freq > count else freq  # fconv's layers are a text
        for freq, count in zip(found, layers, strict=True)
    )


def asked_frequencies(args: Any) -> tuple[int, int]:
    """Return N for encoder and decoder: the larger of the side's own option and ``--moe-freq``."""
    sides = [getattr(args, f"{side}_moe_freq", None) or 0 for side in ("encoder", "decoder")]
    both = getattr(args, "moe_freq", 0)
    if both is None:  # not given; then a side's option may be
        both = 0 if any(sides) else 2
    return max(sides[0], both), max(sides[1], both)


def run_options(
    args: Any, config: type, num_ranks: Optional[int] = None, any_model: bool = False
) -> RunOptions:
    """Read the options of a model with MoE layers.

    Former names in ``args`` become present ones, and options of bundles get their values.
    ``config`` is the dataclass of the model's options. ``num_ranks`` is the number of experts if
    ``--moe-expert-count`` is not given; None: unknown yet, so that no option is too large for it.
    ``any_model``: the model is not one of ours, so that its other options are not known.
    """
    expand(args, config)
    use_present_names(args)
    check_ranges(args, config)
    if not any_model:
        _check_stock_options(args)
        _check_frequencies(args)
    if num_ranks == 1 and not args.moe_expert_count:
        logger.warning(
            "1 expert per MoE layer (by default as many as ranks): equivalent to a dense model; "
            "--moe-expert-count states their number"
        )
    growth, rank = GrowAt.of(args.moe_grow_at), args.moe_lora_rank
    if growth is not None and rank:
        raise ValueError(f"--moe-grow-at {growth} or --moe-lora-rank {rank}: give one of them")
    experts = _built(ExpertConfig, values_of(ExpertConfig, args))
    routing = moe_config(args, args.moe_expert_count or num_ranks or 2**31)
    if routing.local_drop and str(args.moe_expert_placement) == "sliced":
        raise ValueError(
            f"--moe-local-drop {routing.local_drop} leaves tokens on their rank, and "
            "--moe-expert-placement sliced has parts of experts there: give one of them"
        )
    exchange, storage = exchange_config(args), expert_storage(args)
    tuned, measured = _tuned_fields(args), benchmark_of(args)
    return RunOptions(args, routing, exchange, experts, storage, tuned, measured)


def _check_stock_options(args: Any) -> None:
    """Raise ValueError for options of fairseq's models that MoE layers cannot honour."""
    for name in _UNSUPPORTED if any(moe_frequencies(args)) else ():
        if getattr(args, name, None):
            flag = as_flag(name, getattr(args, name))
            raise ValueError(f"{flag} cannot be combined with MoE layers")
    for side in ("encoder", "decoder"):
        layers, heads = (getattr(args, f"{side}_{n}", None) for n in ("layers", "attention_heads"))
        if layers is None:
            continue  # a language model has no encoder
        dim = getattr(args, f"{side}_embed_dim") or getattr(args, "encoder_embed_dim", 0)
        if heads < 1 or dim % heads:
            raise ValueError(
                f"--{side}-embed-dim {dim} is not a multiple of --{side}-attention-heads {heads}"
            )


def _check_frequencies(args: Any) -> None:
    """Raise ValueError if the options ask for MoE layers, but every stack is too short for one."""
    reasons = []
    for side, freq in zip(("encoder", "decoder"), asked_frequencies(args), strict=True):
        layers = getattr(args, f"{side}_layers", None)
        if layers is None or not freq:
            continue
        if freq <= layers:
            return
        own = getattr(args, f"{side}_moe_freq", 0) == freq
        flag = f"--{side}-moe-freq" if own else "--moe-freq"
        reasons.append(f"{flag} {freq} makes no MoE layer among {layers} {side} layers")
    if reasons:
        raise ValueError(f"{'; '.join(reasons)}: give a smaller number, or 0 for a dense model")


def moe_config(args: Any, num_experts: int) -> MoEConfig:
    """Return the routing options; raise ValueError if they contradict each other."""
    preset = str(getattr(args, "moe_preset", None) or "meta")  # older checkpoints have none
    values = values_of(MoEConfig, args)
    _resolve_capacity(values, args.moe_top1_expert, PRESETS[preset]["capacity_factor"])
    if num_experts == 1:
        values.setdefault("top_k", 1)  # the default of 2 is for two experts or more
    values = with_preset(preset, values, num_experts)
    if args.moe_gating_use_model_dtype:
        if values.get("gating_fp32"):
            raise ValueError("--moe-gating-use-fp32 contradicts --moe-gating-use-model-dtype")
        values["gating_fp32"] = False
    if load := benchmark_of(args).force_load:
        values |= {"benchmark": True, "force_load": load}
    return _built(MoEConfig, {"num_experts": num_experts, **values})


def _built(config: Any, values: dict[str, Any]) -> Any:
    """Return the frozen config; ValueErrors have flags in place of arguments."""
    try:
        return config(**values)
    except OptionError as error:
        raise ValueError(with_flags(error.text, *CONFIGS)) from None


def _resolve_capacity(values: dict[str, Any], top1_expert: bool, default: float) -> None:
    """Translate Meta's options for K and the evaluation capacity into those of MoEConfig."""
    if top1_expert and values.setdefault("top_k", 1) != 1:
        raise ValueError(f"--moe-top1-expert contradicts --moe-top-k {values['top_k']}: give one")
    fraction = values.get("eval_capacity_token_fraction")
    if fraction is None:
        return
    if "eval_capacity_factor" in values:
        raise ValueError(
            f"give one of --moe-eval-capacity-token-fraction {fraction} and "
            f"--moe-eval-capacity-factor {values['eval_capacity_factor']}"
        )
    if fraction <= 0:  # its 2021 meaning: evaluate with the training formula
        del values["eval_capacity_token_fraction"]
        values["eval_capacity_factor"] = values.get("capacity_factor", default)


def exchange_config(args: Any) -> ExchangeConfig:
    """Return the all-to-all options; raise ValueError if they contradict each other."""
    values = values_of(ExchangeConfig, args)
    placement, r = str(args.moe_expert_placement), values["r"]
    if placement == "sliced" and args.moe_expert_parallel_size:
        raise ValueError(
            f"--moe-expert-parallel-size {args.moe_expert_parallel_size} is for whole experts, and "
            "--moe-expert-placement sliced cuts them: give one of them"
        )
    if placement == "replicated" and r > 1:
        raise ValueError(
            f"--moe-parallelism-r {r} is for slices: give --moe-expert-placement sliced, or 0 or 1"
        )
    if values["balance_ranks"] and "auto" in (str(args.moe_exchange), str(args.moe_parallelism_r)):
        raise ValueError(
            "--moe-balance-ranks needs --moe-exchange linear and --moe-parallelism-r 1, not 'auto'"
        )
    return _built(ExchangeConfig, values)


def _tuned_fields(args: Any) -> tuple[str, ...]:
    """Return the fields of ExchangeConfig to tune; ValueError for options that exclude tuning."""
    fields = tuple(field for field, flag in TUNED.items() if str(getattr(args, flag)) == "auto")
    if not fields:
        if args.moe_tune_file is not None:
            choices = f"give {' or '.join(as_flag(flag, 'auto') for flag in TUNED.values())}"
            raise ValueError(f"--moe-tune-file {args.moe_tune_file}: nothing is tuned: {choices}")
        return ()
    autos = " and ".join(as_flag(TUNED[field], "auto") for field in fields)
    given = benchmark_of(args)
    for key, why in (
        ("record_exchange_time", "which measures without overlap"),
        ("skip_exchange", "which leaves out the exchanges"),
        ("simulate_world_size", "which exchanges nothing"),
    ):
        if value := getattr(given, key):
            other = f"--moe-benchmark {key}={str(value).lower()}"
            raise ValueError(f"{autos} cannot be combined with {other}, {why}")
    return fields
