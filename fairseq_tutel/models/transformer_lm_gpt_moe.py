"""``--arch transformer_lm_gpt_moe``: fairseq's GPT-style language model with MoE layers."""

from __future__ import annotations

import logging

import torch
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.transformer import Embedding
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import nn

import fairseq_tutel

from .. import ops
from ..distributed import build_groups, process_world
from ..moe import MoELayer
from .decoder import MoETransformerDecoder
from .options import TransformerLMGPTMoEConfig, apply_command_line_rules, check_model_options
from .registered import follow_registries
from .routing_options import moe_config

logger = logging.getLogger(__name__)


class StableEmbedding(nn.Embedding):
    """Token embedding, Xavier-initialised and layer-normalised in fp32 (arXiv 2110.02861)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        nn.init.xavier_uniform_(self.weight)
        nn.init.constant_(self.weight[padding_idx], 0)
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., M]."""
        norm = self.norm
        emb = nn.functional.layer_norm(
            super().forward(tokens).float(),
            norm.normalized_shape,
            norm.weight.float(),
            norm.bias.float(),
            norm.eps,
        )
        return emb.to(self.weight.dtype)


@register_model("transformer_lm_gpt_moe", dataclass=TransformerLMGPTMoEConfig)
class TransformerLMGPTMoE(TransformerLanguageModel):
    """Language model of ``transformer_lm_gpt`` whose every second FFN (by default) is sparse."""

    @classmethod
    def hub_models(cls):
        """No pre-trained model is published under this name."""
        return {}

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As fairseq's; registers the package with fairseq first, so that sets of files load."""
        fairseq_tutel.register()
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def build_model(cls, args, task):
        """Build the model; a collective call where torch.distributed is initialised.

        Raises:
            ValueError: an option that MoE layers cannot honour, or an expert count that does not
                fit the number of ranks.
        """
        _, world_size = process_world()
        world_size = max(world_size, args.moe_simulate_world_size)
        check_model_options(args)
        _fill_sizes(args)
        groups = routing = None
        if args.moe_freq and args.alternate_decoder_ffn_embed_dim <= 0:
            num_experts = args.moe_expert_count or world_size
            if num_experts == 1 and not args.moe_expert_count:
                logger.warning(
                    "1 expert per MoE layer (by default as many as ranks): equivalent to a dense "
                    "model; --moe-expert-count states their number"
                )
            routing = moe_config(args, num_experts)
            groups = build_groups(
                num_experts,
                expert_parallel_size=args.moe_expert_parallel_size,
                simulate_world_size=args.moe_simulate_world_size,
                placement=str(args.moe_expert_placement),
            )
            ops.set_backend(str(args.moe_backend))
        embed_tokens = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        decoder = MoETransformerDecoder(args, task.target_dictionary, embed_tokens, groups, routing)
        if groups is not None and groups.simulated:
            logger.warning(
                "SIMULATION: this process is one rank of %d; all-to-alls are local copies and "
                "the losses mean nothing",
                groups.world_size,
            )
        return cls(decoder)

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        """Token embedding."""
        make = StableEmbedding if getattr(args, "use_stable_embedding", False) else Embedding
        return make(len(dictionary), embed_dim, dictionary.pad())

    @property
    def moe_layers(self) -> dict[int, MoELayer]:
        """MoE layers by decoder layer number (0-based)."""
        return self.decoder.moe_layers

    @property
    def exchange_tuner(self):
        """:class:`~fairseq_tutel.hosts.ExchangeTuner` of the layers; None: nothing is tuned."""
        return self.decoder.exchange_tuner

    @property
    def moe_groups(self):
        """Placement of the experts, None without MoE layers."""
        return self.decoder.moe_groups


def _fill_sizes(args) -> None:
    """Sizes that follow from others, as in fairseq's functions for this arch."""
    args.decoder_normalize_before = True  # training is not stable without it (fairseq's own words)
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(args, name) is None:
            setattr(args, name, args.decoder_embed_dim)
    if getattr(args, "decoder_layers_to_keep", None):  # of dense models
        args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
    if args.max_target_positions is None:
        args.max_target_positions = args.tokens_per_sample
    if args.offload_activations:
        args.checkpoint_activations = True


def _named_arch(name: str, **sizes) -> None:
    """Register an arch that is the model with other default sizes."""

    def set_sizes(args):
        for key, value in sizes.items():
            if getattr(args, key, None) is None:
                setattr(args, key, value)
        if hasattr(args, "arch"):  # the command line's namespace, not a config from a checkpoint
            apply_command_line_rules(args)

    register_model_architecture("transformer_lm_gpt_moe", name)(set_sizes)


# register_model gives the model's own arch name an empty function
ARCH_CONFIG_REGISTRY["transformer_lm_gpt_moe"] = apply_command_line_rules
follow_registries(TransformerLMGPTMoEConfig, "transformer_lm_gpt_moe")


def _gpt(layers: int, dim: int, heads: int, experts: int) -> dict:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": 4 * dim,
        "decoder_attention_heads": heads,
        "moe_expert_count": experts,
        "share_decoder_input_output_embed": True,
    }


# README.moe.md of fairseq's moe branch
_named_arch("transformer_lm_gpt_moe_4_1b", **_gpt(24, 2048, 32, 8))
_named_arch("transformer_lm_gpt_moe_142b", **_gpt(32, 4096, 32, 64))
# Artetxe et al., Efficient Large Scale Language Modeling with Mixtures of Experts (arXiv
# 2112.10684), table 1
_named_arch("transformer_lm_gpt_moe_15b", **_gpt(12, 768, 12, 512))
_named_arch("transformer_lm_gpt_moe_52b", **_gpt(24, 1024, 16, 512))
_named_arch("transformer_lm_gpt_moe_207b", **_gpt(24, 2048, 32, 512))
_named_arch("transformer_lm_gpt_moe_1_1t", **_gpt(32, 4096, 32, 512))
