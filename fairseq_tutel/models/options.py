"""Options of ``--arch transformer_lm_gpt_moe``: sizes here, others in the files beside this one.

Names, defaults and meanings are those of fairseq's ``moe`` branch, so that its published commands
run as they are; what those options lack has new names. Differences in a default are stated in
the help text.
"""

# no postponed annotations here: fairseq reads the types of dataclass fields
import argparse
import importlib.util
import logging
from dataclasses import dataclass
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from ..ranges import FRACTION, at_least, check_ranges, ranges_of
from .exchange_options import ExchangeOptions, exchange_config
from .option_fields import option
from .routing_options import RoutingOptions, moe_config
from .stock_ranges import check_stock_ranges
from .tuning_options import TuningOptions, tuned_fields

logger = logging.getLogger(__name__)


@dataclass
class TransformerLMGPTMoEConfig(
    TuningOptions, ExchangeOptions, RoutingOptions, TransformerLanguageModelConfig
):
    """Sizes of ``transformer_lm_gpt`` with an MoE layer in every other block."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option(
        "gelu", "activation function to use"
    )
    dropout: float = option(0.1, "dropout probability", FRACTION)
    attention_dropout: float = option(0.1, "dropout probability for attention weights", FRACTION)
    decoder_embed_dim: int = option(768, "decoder embedding dimension", at_least(1))
    decoder_output_dim: Optional[int] = option(
        None,
        "decoder output dimension (default: the embedding dimension)",
        at_least(1),
    )
    decoder_input_dim: Optional[int] = option(
        None,
        "decoder input dimension (default: the embedding dimension)",
        at_least(1),
    )
    decoder_ffn_embed_dim: int = option(3072, "decoder embedding dimension for FFN", at_least(1))
    decoder_layers: int = option(12, "num decoder layers", at_least(1))
    decoder_attention_heads: int = option(12, "num decoder attention heads", at_least(1))

    # options of fairseq's moe branch
    moe_freq: int = option(
        2,
        "layer i (from 1) is an MoE layer if i is a multiple of this; 0: no MoE layers",
        at_least(0),
    )
    moe_expert_count: int = option(
        0,
        "experts per MoE layer over all ranks (default: the world size, one expert per rank)",
        at_least(0),
    )
    moe_expert_ffn_dim: Optional[int] = option(
        None,
        "hidden dimension of the experts (default: --decoder-ffn-embed-dim)",
        at_least(1),
    )
    moe_shared_expert_ffn_dim: int = option(
        0,
        "> 0: hidden dimension of an expert that all tokens go to, beside those that they are "
        "routed to; dense, on every rank",
        at_least(0),
    )
    alternate_decoder_ffn_embed_dim: int = option(
        0,
        "> 0: dense layers of this FFN width instead of MoE layers (a FLOP-matched baseline)",
        at_least(0),
    )
    use_stable_embedding: bool = option(
        False, "layer-normalise the token embeddings (arXiv 2110.02861, section 2.3)"
    )
    num_workers_valid: int = option(
        0,
        "subprocesses that load validation data (with MoE models; --num-workers in training)",
        at_least(0),
    )

    # what those lack
    moe_backend: ChoiceEnum(("auto", "triton", "torch")) = option(
        "auto", "operators of the MoE layers: Triton kernels on GPUs and torch elsewhere, or one"
    )
    moe_load_log_interval: int = option(
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
    tuned_fields(args)
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
