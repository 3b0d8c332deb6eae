"""``--arch transformer_moe``: fairseq's encoder-decoder transformer with MoE layers."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import TransformerConfig, TransformerModelBase

from ....config.options import at_least, option
from ....moe import MoELayer
from ..options.options import MoEOptions, moe_frequencies, run_options
from . import moe_stack
from .architectures import moe_architecture
from .conditional_routing import ConditionalRoutingOptions
from .moe_stack import MoEModel
from .transformer_fields import FlatTransformerConfig, fill_sizes
from .transformer_stacks import MoETransformerDecoder, MoETransformerEncoder, Sparsity

_SIDE = "--moe-freq of the {} alone (transformer_moe); with it --moe-freq defaults to 0"
_WIDTH = "> 0: dense layers of this FFN width instead of the {}'s MoE layers"


@dataclass
class TransformerMoEConfig(ConditionalRoutingOptions, MoEOptions, FlatTransformerConfig):
    """Options of fairseq's ``transformer``, with MoE layers in both stacks."""

    moe_freq: Optional[int] = option(
        None,
        "layer i (from 1) of encoder and decoder is an MoE layer if i is a multiple of this "
        "(default: 2, or 0, none, if a side's own option is given)",
        at_least(0),
        group="size",
    )
    encoder_moe_freq: int = option(0, _SIDE.format("encoder"), at_least(0), group="size")
    decoder_moe_freq: int = option(0, _SIDE.format("decoder"), at_least(0), group="size")
    moe_gate_loss_over: ChoiceEnum(("unpadded", "all", "longest")) = option(
        "longest",
        MoEOptions.__dataclass_fields__["moe_gate_loss_over"].metadata["help"],
        group="balance",
    )
    alternate_ffn_embed_dim: int = option(0, _WIDTH.format("encoder"), at_least(0), group="size")
    alternate_decoder_ffn_embed_dim: int = option(
        0, _WIDTH.format("decoder"), at_least(0), group="size"
    )


def _sizes(dim: int, ffn: int, heads: int, **others: Any) -> dict:
    found = {"embed_dim": dim, "ffn_embed_dim": ffn, "attention_heads": heads}
    return {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in found.items()} | others


_24_LAYERS = {
    "encoder_layers": 24,
    "decoder_layers": 24,
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "share_all_embeddings": True,
    "max_source_positions": 512,
    "max_target_positions": 512,
}
_SIZES = {
    # stock transformer_wmt_en_de and transformer_wmt_en_de_big (arXiv 1706.03762, table 3)
    "base": _sizes(512, 2048, 8),
    "big": _sizes(1024, 4096, 16, dropout=0.3, attention_dropout=0.1),
    # NLLB, arXiv 2207.04672: its ablations, and the model of 54.5 billion parameters
    "24_24": _sizes(1024, 8192, 16, moe_freq=2, moe_expert_count=64, **_24_LAYERS),
    "nllb_54b": _sizes(2048, 8192, 16, moe_freq=4, moe_expert_count=128, **_24_LAYERS),
}


@moe_architecture("transformer_moe", TransformerMoEConfig, "transformer", _SIZES)
class TransformerMoE(MoEModel, TransformerModelBase):
    """Encoder-decoder with experts in every second FFN of both stacks (by default)."""

    exchange_tuner = None  # None: each layer uses the exchange that it was built with

    @classmethod
    def build_model(cls, args, task):
        """Build the model; a collective call if torch.distributed is initialised."""
        widths = args.alternate_ffn_embed_dim, args.alternate_decoder_ffn_embed_dim
        sides = list(zip(moe_frequencies(args), widths, strict=True))
        sparse = any(freq and width <= 0 for freq, width in sides)
        ranks = moe_stack.world_size(args) if sparse else None
        run = run_options(args, TransformerMoEConfig, ranks)
        fill_sizes(args)
        cfg = TransformerConfig.from_namespace(args)
        for name, value in vars(cfg).items():
            if isinstance(value, Enum):  # text from stock's parser, and layers of forks read text
                setattr(cfg, name, value.value)
        factory = moe_stack.LayerFactory(run) if sparse else None
        # the stock method builds the encoder first, and hands cfg to both builders
        gate_dropout = args.cmr_gate_drop if args.moe_cmr else None
        cfg.sparsity = [
            Sparsity(freq, factory if width <= 0 else None, width, gate_dropout)
            for freq, width in sides
        ]
        model = super().build_model(cfg, task)
        del cfg.sparsity
        model.exchange_tuner = moe_stack.make_tuner(run, list(model.moe_layers.values()))
        return moe_stack.with_lora(model, run)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return MoETransformerEncoder(cfg.sparsity[0], cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return MoETransformerDecoder(
            cfg.sparsity[1], cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )

    def forward(self, src_tokens, src_lengths, prev_output_tokens, **options):
        """Compute the stock method; add what ``reports_to_extra`` returns to its second result."""
        stacks = [list(stack.moe_layers.values()) for stack in (self.encoder, self.decoder)]
        counts = [src_tokens.numel(), prev_output_tokens.numel()]
        dtype, tuner = self.decoder.embed_tokens.weight.dtype, self.exchange_tuner
        steps = moe_stack.agree(stacks, counts, dtype, tuner, generating=False)
        whole = self._is_generation_fast  # prepared for inference: drops nothing
        with (
            self.encoder.scope.open(steps[0], whole) as of_encoder,
            self.decoder.scope.open(steps[1], whole) as of_decoder,
        ):
            x, extra = super().forward(src_tokens, src_lengths, prev_output_tokens, **options)
        layers = list(self.moe_layers.values())
        reports = [*of_encoder, *of_decoder]
        return x, {**(extra or {}), **moe_stack.reports_to_extra(reports, layers, steps[0])}

    @property
    def moe_layers(self) -> dict[str, MoELayer]:
        """MoE layers by stack and 0-based number of the layer in it: ``encoder.1``."""
        return {
            f"{stack.side}.{number}": layer
            for stack in (self.encoder, self.decoder)
            for number, layer in stack.moe_layers.items()
        }
