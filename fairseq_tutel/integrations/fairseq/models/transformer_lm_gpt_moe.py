"""``--arch transformer_lm_gpt_moe``: fairseq's GPT-style language model with MoE layers."""

from dataclasses import dataclass
from typing import Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import Embedding, TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from ....config.options import at_least, option
from ....moe import MoELayer
from ..options.options import MoEOptions, run_options
from .architectures import moe_architecture
from .moe_stack import LayerFactory, MoEModel, make_tuner, with_lora, world_size
from .transformer_fields import fill_decoder_sizes
from .transformer_stacks import MoETransformerDecoder, Sparsity


@dataclass
class TransformerLMGPTMoEConfig(MoEOptions, TransformerLanguageModelConfig):
    """Sizes of ``transformer_lm_gpt`` with an MoE layer in every other block."""

    # defaults of fairseq's functions for this arch, other than those of its dataclass
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = "gelu"
    attention_dropout: float = 0.1
    decoder_embed_dim: int = 768
    decoder_output_dim: Optional[int] = None  # as decoder_embed_dim
    decoder_input_dim: Optional[int] = None
    decoder_ffn_embed_dim: int = 3072
    decoder_layers: int = 12
    decoder_attention_heads: int = 12

    alternate_decoder_ffn_embed_dim: int = option(
        0,
        "> 0: dense layers of this FFN width instead of MoE layers (a FLOP-matched baseline)",
        at_least(0),
        group="size",
    )
    use_stable_embedding: bool = option(
        False, "layer-normalise the token embeddings (arXiv 2110.02861)", group="size"
    )


class StableEmbedding(nn.Embedding):
    """Token embedding, Xavier-initialised and layer-normalised in fp32 (arXiv 2110.02861)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        nn.init.xavier_uniform_(self.weight)
        nn.init.constant_(self.weight[padding_idx], 0)
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., M]."""
        norm, x = self.norm, super().forward(tokens).float()
        weight, bias = norm.weight.float(), norm.bias.float()
        x = nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        return x.to(self.weight.dtype)


def _gpt(layers: int, dim: int, heads: int, experts: int) -> dict:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": 4 * dim,
        "decoder_attention_heads": heads,
        "moe_expert_count": experts,
        "share_decoder_input_output_embed": True,
    }


_SIZES = {
    # README.moe.md of fairseq's moe branch
    "4_1b": _gpt(24, 2048, 32, 8),
    "142b": _gpt(32, 4096, 32, 64),
    # Artetxe et al., Efficient Large Scale Language Modeling with Mixtures of Experts (arXiv
    # 2112.10684), table 1
    "15b": _gpt(12, 768, 12, 512),
    "52b": _gpt(24, 1024, 16, 512),
    "207b": _gpt(24, 2048, 32, 512),
    "1_1t": _gpt(32, 4096, 32, 512),
}


@moe_architecture("transformer_lm_gpt_moe", TransformerLMGPTMoEConfig, "transformer_lm", _SIZES)
class TransformerLMGPTMoE(MoEModel, TransformerLanguageModel):
    """Language model ``transformer_lm_gpt`` with experts in every second FFN (by default)."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model; a collective call if torch.distributed is initialised."""
        width = args.alternate_decoder_ffn_embed_dim
        sparse = args.moe_freq and width <= 0
        run = run_options(args, TransformerLMGPTMoEConfig, world_size(args) if sparse else None)
        _fill_sizes(args)
        factory = LayerFactory(run) if sparse else None
        embed_tokens = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        decoder = MoETransformerDecoder(
            Sparsity(args.moe_freq, factory, width),
            TransformerConfig.from_namespace(args),
            task.target_dictionary,
            embed_tokens,
            no_encoder_attn=True,
        )
        decoder.exchange_tuner = make_tuner(run, list(decoder.moe_layers.values()))
        return with_lora(cls(decoder), run)

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        """Build the token embedding."""
        make = StableEmbedding if getattr(args, "use_stable_embedding", False) else Embedding
        return make(len(dictionary), embed_dim, dictionary.pad())

    @property
    def moe_layers(self) -> dict[int, MoELayer]:
        """MoE layers by decoder layer number (0-based)."""
        return self.decoder.moe_layers

    @property
    def exchange_tuner(self):
        """Tuner of the layers (:class:`~fairseq_tutel.tuning.ExchangeTuner`) or None."""
        return self.decoder.exchange_tuner


def _fill_sizes(args) -> None:
    """Derive sizes from others, as fairseq's functions for this arch do."""
    args.decoder_normalize_before = True  # training is not stable without it (fairseq's own words)
    fill_decoder_sizes(args)
    if getattr(args, "decoder_layers_to_keep", None):  # of dense models
        args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
    if args.max_target_positions is None:
        args.max_target_positions = args.tokens_per_sample
