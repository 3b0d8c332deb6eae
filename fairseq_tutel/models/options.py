"""Options of ``--arch transformer_lm_gpt_moe`` and their translation into an :class:`MoEConfig`.

Names, defaults and meanings are those of fairseq's ``moe`` branch, so that its published commands
run as they are; what those options lack has new names. Differences in a default are stated in
the help text.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
import argparse
import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from ..config import (
    BALANCE_CHOICES,
    BALANCE_SCOPES,
    DROP_POLICIES,
    EXPERT_GRAD_NORMALIZATIONS,
    LOAD_BIASES,
    ROUTERS,
    SCORE_FUNCTIONS,
    SECOND_EXPERT_POLICIES,
    WIRES,
    ExchangeConfig,
    MoEConfig,
    resolve_capacity,
)
from ..ranges import FRACTION, Range, at_least, check_ranges, ranges_of
from .stock_ranges import check_stock_ranges

logger = logging.getLogger(__name__)


_ROUTING = ranges_of(MoEConfig)
_EXCHANGE = ranges_of(ExchangeConfig)


def _option(default: Any, help_text: str, allowed: Optional[Range] = None):
    """A field of a dataclass of options; ``allowed`` is the range of a number (:mod:`..ranges`)."""
    return field(default=default, metadata={"help": help_text, "range": allowed})


@dataclass
class TransformerLMGPTMoEConfig(TransformerLanguageModelConfig):
    """Sizes of ``transformer_lm_gpt`` with an MoE layer in every other block."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = _option(
        "gelu", "activation function to use"
    )
    dropout: float = _option(0.1, "dropout probability", FRACTION)
    attention_dropout: float = _option(0.1, "dropout probability for attention weights", FRACTION)
    decoder_embed_dim: int = _option(768, "decoder embedding dimension", at_least(1))
    decoder_output_dim: Optional[int] = _option(
        None,
        "decoder output dimension (default: the embedding dimension)",
        at_least(1),
    )
    decoder_input_dim: Optional[int] = _option(
        None,
        "decoder input dimension (default: the embedding dimension)",
        at_least(1),
    )
    decoder_ffn_embed_dim: int = _option(3072, "decoder embedding dimension for FFN", at_least(1))
    decoder_layers: int = _option(12, "num decoder layers", at_least(1))
    decoder_attention_heads: int = _option(12, "num decoder attention heads", at_least(1))

    # options of fairseq's moe branch
    moe_freq: int = _option(
        2,
        "layer i (from 1) is an MoE layer if i is a multiple of this; 0: no MoE layers",
        at_least(0),
    )
    moe_expert_count: int = _option(
        0,
        "experts per MoE layer over all ranks (default: the world size, one expert per rank)",
        at_least(0),
    )
    moe_gating_use_fp32: Optional[bool] = _option(
        None, "compute the gate with fp32 output (the default; see --moe-gating-use-model-dtype)"
    )
    moe_second_expert_policy: ChoiceEnum(SECOND_EXPERT_POLICIES) = _option(
        "sampling",
        "choices after the first: 'all': the next best expert; 'sampling': the best after adding "
        "Gumbel noise; 'random': the next best, kept with probability K * gate. Evaluation takes "
        "the next best and keeps it",
    )
    moe_normalize_gate_prob_before_dropping: bool = _option(
        False, "normalise the gate values of a token before, not after, dropping over capacity"
    )
    moe_expert_ffn_dim: Optional[int] = _option(
        None,
        "hidden dimension of the experts (default: --decoder-ffn-embed-dim)",
        at_least(1),
    )
    moe_top1_expert: bool = _option(False, "route each token to one expert, not two")
    moe_eval_capacity_token_fraction: Optional[float] = _option(
        None,
        "evaluation capacity of an expert as a fraction of the tokens of a batch; <= 0: the "
        "training formula (default: evaluation drops no token; the moe branch's default is 0.25)",
        _ROUTING["eval_capacity_token_fraction"],
    )
    moe_normalize_expert_grad: ChoiceEnum(EXPERT_GRAD_NORMALIZATIONS) = _option(
        "world_size",
        "divide expert gradients by the number of ranks (the true gradient) or by its square root",
    )
    use_moe_pad_mask: bool = _option(False, "do not route padding tokens")
    moe_batch_prioritized_routing: bool = _option(
        False, "give capacity to the tokens with the highest gate values first"
    )
    record_a2a_perf_stats: bool = _option(
        False, "log the time of the forward all-to-alls (synchronises each layer: slow, no overlap)"
    )
    dummy_a2a: bool = _option(
        False, "leave out the all-to-alls, for benchmarks; the results are wrong"
    )
    alternate_decoder_ffn_embed_dim: int = _option(
        0,
        "> 0: dense layers of this FFN width instead of MoE layers (a FLOP-matched baseline)",
        at_least(0),
    )
    use_stable_embedding: bool = _option(
        False, "layer-normalise the token embeddings (arXiv 2110.02861, section 2.3)"
    )
    num_workers_valid: int = _option(
        0,
        "subprocesses that load validation data (with MoE models; --num-workers in training)",
        at_least(0),
    )

    # what those lack
    moe_top_k: Optional[int] = _option(
        None,
        "experts per token (default: 2, or 1 with --moe-top1-expert)",
        _ROUTING["top_k"],
    )
    moe_capacity_factor: Optional[float] = _option(
        None,
        "training capacity: f > 0: top_k * f * tokens / experts per expert and rank; 0: drop "
        "nothing; f < 0: what is needed, up to that of -f (default: 1.0)",
        _ROUTING["capacity_factor"],
    )
    moe_eval_capacity_factor: Optional[float] = _option(
        None,
        "evaluation capacity, the same meaning (default: 0, drop nothing)",
        _ROUTING["eval_capacity_factor"],
    )
    moe_gating_use_model_dtype: bool = _option(
        False, "round the gate's logits to the model's dtype (turns fp32 gating off)"
    )
    # choices and help of this and of moe_a2a, and the routers' own options: see registered.py
    moe_router: str = _option("linear", "the gate")
    moe_gate_noise: float = _option(
        0.0,
        "standard deviation, times the expert count, of noise on the logits in training",
        _ROUTING["gate_noise"],
    )
    moe_input_jitter: float = _option(
        0.0,
        "multiply the gate's input by uniform(1-j, 1+j) in training",
        _ROUTING["input_jitter"],
    )
    moe_input_dropout: float = _option(
        0.0, "dropout on the input of MoE layers in training", _ROUTING["input_dropout"]
    )
    moe_z_loss_wt: float = _option(
        0.0,
        "weight of the router z-loss inside the gate loss (arXiv 2202.08906)",
        _ROUTING["z_loss_weight"],
    )
    moe_load_importance_loss: bool = _option(
        False, "load and importance losses (arXiv 1701.06538) for GShard's; needs --moe-gate-noise"
    )
    moe_gate_loss_scope: ChoiceEnum(BALANCE_SCOPES) = _option(
        "rank",
        "tokens that the balance loss balances: 'rank': those of each rank and batch; 'global': of "
        "all ranks together, in training; 'sequence': of every sequence by itself",
    )
    moe_gate_loss_choices: ChoiceEnum(BALANCE_CHOICES) = _option(
        "first", "choices of a token that the balance loss counts: the 'first', or 'all'"
    )
    moe_load_bias: ChoiceEnum(LOAD_BIASES) = _option(
        "none",
        "balance experts by a bias on their selection that follows the load, without a loss: "
        "'quantile': every update as far as its tokens need; 'sign': by --moe-load-bias-rate; "
        "needs --moe-second-expert-policy all",
    )
    moe_load_bias_rate: float = _option(
        0.001, "step of --moe-load-bias sign", _ROUTING["load_bias_rate"]
    )
    moe_load_bias_entropy: bool = _option(
        False, "experimental: multiply the load bias by the relative entropy of a token's gate"
    )
    moe_overflow_rerouting: int = _option(
        0,
        "choices after the first top-k that a token may try where an expert is full",
        _ROUTING["overflow_rerouting"],
    )
    moe_drop_policy: ChoiceEnum(DROP_POLICIES) = _option(
        "position",
        "what a full expert drops: the last in the batch ('position'), the least gate values "
        "('probability'), or 'random' tokens (in training)",
    )
    moe_score_function: ChoiceEnum(SCORE_FUNCTIONS) = _option(
        "softmax", "gate values: the 'softmax' of the logits, or the 'sigmoid' of each"
    )
    moe_route_scale: float = _option(
        1.0, "factor of the weights of the experts' outputs", _ROUTING["route_scale"]
    )
    moe_backend: ChoiceEnum(("auto", "triton", "torch")) = _option(
        "auto", "operators of the MoE layers: Triton kernels on GPUs and torch elsewhere, or one"
    )
    moe_a2a: str = _option("linear", "how tokens travel between ranks")
    moe_ranks_per_node: int = _option(
        0,
        "ranks that share a node, for hierarchical all-to-alls (default: as found)",
        _EXCHANGE["ranks_per_node"],
    )
    moe_overlap_degree: int = _option(
        1,
        "chunks (1, 2, 4 or 8) in which tokens travel to the experts and back, so that one is "
        "computed while others travel; pays where that takes about as long as the experts",
        _EXCHANGE["overlap_degree"],
    )
    moe_wire: ChoiceEnum(WIRES) = _option(
        "same",
        "how tokens are written on their way to other ranks: 'same': as they are; 'bf16'; 'fp16' "
        "and 'fp8': with a scale per 128 values, so that nothing overflows; where that is narrower",
    )
    moe_wire_back: ChoiceEnum(("auto", *WIRES)) = _option(
        "auto", "the same for experts' outputs; 'auto': as --moe-wire, but bf16 where that is fp8"
    )
    moe_wire_grad: ChoiceEnum(("auto", *WIRES)) = _option(
        "auto", "the same for gradients, both ways ('fp8' is e5m2 there, e4m3 elsewhere)"
    )
    moe_wire_compact: bool = _option(
        False,
        "with a capacity in training, only the rows in use travel and are computed; the host waits "
        "for the counts of each layer",
    )
    moe_simulate_world_size: int = _option(
        0,
        "simulate one rank of this many in one process: all-to-alls become local copies",
        at_least(0),
    )
    moe_load_log_interval: int = _option(
        0,
        "> 0: append load and utilisation of the experts to SAVE_DIR/expert_load.jsonl every so "
        "many updates",
        at_least(0),
    )


_UNSUPPORTED = {
    "base_layers": "BASE layers",
    "scale_fc": "a LayerNorm inside the FFN (--scale-fc)",
    "quant_noise_pq": "quantisation noise (--quant-noise-pq)",
    "character_embeddings": "embeddings of characters (--character-embeddings)",
    "adaptive_input": "adaptive input embeddings (--adaptive-input)",
    "adaptive_softmax_cutoff": "an adaptive softmax (--adaptive-softmax-cutoff)",
    "decoder_layers_to_keep": "pruned layers (--decoder-layers-to-keep)",
}


def moe_config(args, num_experts: int) -> MoEConfig:
    """The routing options of a model config (or argparse namespace) as an :class:`MoEConfig`.

    Raises:
        ValueError: an impossible value, or two options that contradict each other.
    """
    if args.moe_gating_use_fp32 and args.moe_gating_use_model_dtype:
        raise ValueError(
            "--moe-gating-use-fp32 and --moe-gating-use-model-dtype contradict each other"
        )
    router = str(args.moe_router)
    fp32 = not args.moe_gating_use_model_dtype and args.moe_gating_use_fp32 is not False
    return MoEConfig(
        num_experts=num_experts,
        **resolve_capacity(
            top1_expert=args.moe_top1_expert,
            # the default of 2 means one expert where there is only one
            top_k=1 if num_experts == 1 and args.moe_top_k is None else args.moe_top_k,
            capacity_factor=args.moe_capacity_factor,
            eval_capacity_factor=args.moe_eval_capacity_factor,
            eval_capacity_token_fraction=args.moe_eval_capacity_token_fraction,
        ),
        second_expert_policy=str(args.moe_second_expert_policy),
        normalize_before_dropping=args.moe_normalize_gate_prob_before_dropping,
        batch_prioritized=args.moe_batch_prioritized_routing,
        use_pad_mask=args.use_moe_pad_mask,
        gating_fp32=fp32,
        router=router,
        router_options=ROUTERS.options_of_flags(router, args),
        gate_noise=args.moe_gate_noise,
        input_jitter=args.moe_input_jitter,
        input_dropout=args.moe_input_dropout,
        z_loss_weight=args.moe_z_loss_wt,
        load_importance_loss=args.moe_load_importance_loss,
        balance_scope=str(args.moe_gate_loss_scope),
        balance_choices=str(args.moe_gate_loss_choices),
        load_bias=str(args.moe_load_bias),
        load_bias_rate=args.moe_load_bias_rate,
        score_function=str(args.moe_score_function),
        load_bias_entropy=args.moe_load_bias_entropy,
        overflow_rerouting=args.moe_overflow_rerouting,
        drop_policy=str(args.moe_drop_policy),
        route_scale=args.moe_route_scale,
    )


def exchange_config(args) -> ExchangeConfig:
    """How tokens travel between ranks, of a model config (or argparse namespace)."""
    return ExchangeConfig(
        algorithm=str(args.moe_a2a),
        ranks_per_node=args.moe_ranks_per_node,
        wire=str(args.moe_wire),
        wire_back=str(args.moe_wire_back),
        wire_grad=str(args.moe_wire_grad),
        wire_compact=args.moe_wire_compact,
        overlap_degree=args.moe_overlap_degree,
    )


def check_model_options(args) -> None:
    """Refuse what an MoE decoder cannot do, with the option's name and value.

    Raises:
        ValueError: see above.
    """
    check_ranges(args, ranges_of(TransformerLMGPTMoEConfig))
    if args.moe_freq > args.decoder_layers:
        raise ValueError(
            f"--moe-freq {args.moe_freq} makes no MoE layer among {args.decoder_layers} layers; "
            "use --arch transformer_lm_gpt, or --moe-freq 0, for a dense model"
        )
    for name, what in _UNSUPPORTED.items():
        if args.moe_freq and getattr(args, name, None):
            raise ValueError(f"{what} cannot be combined with MoE layers")
    if args.moe_freq and args.decoder_layerdrop > 0:
        raise ValueError(
            f"--decoder-layerdrop {args.decoder_layerdrop} cannot be combined with MoE layers: it "
            "would drop different layers on different ranks, whose all-to-alls would not meet"
        )
    heads, dim = args.decoder_attention_heads, args.decoder_embed_dim
    if dim % heads:
        raise ValueError(
            f"--decoder-embed-dim {dim} is not a multiple of --decoder-attention-heads {heads}"
        )


def apply_command_line_rules(args: argparse.Namespace) -> None:
    """Fix up parsed arguments; fairseq calls the function of an arch with all of them.

    - ``--ddp-backend fully_sharded`` of the published commands becomes ``legacy_ddp``: experts are
      spread over the ranks in any case, and the dense parameters are replicated.
    - ``--bf16`` makes stock fairseq look for a TPU; without torch_xla it means GPUs or CPUs.
    - options that contradict each other end the program here, before anything is built.
    """
    if getattr(args, "ddp_backend", None) == "fully_sharded":
        args.ddp_backend = "legacy_ddp"
        if getattr(args, "distributed_rank", 0) == 0:
            logger.warning(
                "--ddp-backend fully_sharded: experts are spread over the ranks in any case; the "
                "dense parameters are replicated (legacy_ddp)"
            )
    if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False
    values = _WithDefaults(args)
    try:
        check_stock_ranges(args)
        check_model_options(values)
        moe_config(values, num_experts=values.moe_expert_count or 2**31)
        exchange_config(values)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


class _WithDefaults:
    """A namespace in which options that were not given have the dataclass's defaults."""

    def __init__(self, args: argparse.Namespace):
        self._args = args

    def __getattr__(self, name):
        if hasattr(self._args, name):
            return getattr(self._args, name)
        return TransformerLMGPTMoEConfig.__dataclass_fields__[name].default
