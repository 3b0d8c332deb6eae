"""Parameter counts as formulas; ``tests/plan`` holds them against models on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

from ..moe.routers import describe_router
from .settings import Settings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        embeddings: of embeddings, final norm and output projection.
        dense_layer: of a layer with a dense FFN (the mean, where widths differ).
        moe_layer: of an MoE layer without its experts: attention, norms and gate.
        dense: of everything but the experts; every GPU holds all of it.
        expert: of one expert.
        experts: E, per MoE layer, over all GPUs.
        local_experts: e, per MoE layer and GPU.
        moe_layers: number of MoE layers.
        largest: elements of the largest tensor on a GPU.
    """

    embeddings: int
    dense_layer: int
    moe_layer: int
    dense: int
    expert: int
    experts: int
    local_experts: int
    moe_layers: int
    largest: int

    @property
    def local(self) -> int:
        """Expert parameters on one GPU."""
        return self.expert * self.local_experts * self.moe_layers

    @property
    def per_gpu(self) -> int:
        """All parameters on one GPU."""
        return self.dense + self.local

    @property
    def total(self) -> int:
        """Distinct parameters of the model."""
        return self.dense + self.expert * self.experts * self.moe_layers


def moe_layer_numbers(settings: Settings) -> range:
    """Numbers, from 1, of the layers with experts."""
    if settings.routing is None:
        return range(0)
    return range(
        settings.model.moe_freq, settings.model.decoder_layers + 1, settings.model.moe_freq
    )


def count_parameters(settings: Settings) -> Parameters:
    """Count the parameters of a run."""
    model, routing = settings.model, settings.routing
    dim, moe_layers = model.decoder_embed_dim, len(moe_layer_numbers(settings))
    expert = _ffn(dim, model.moe_expert_ffn_dim)
    experts = routing.num_experts if routing else 0
    local = -(-experts // settings.gpus)
    attention = _attention(settings)
    moe_layer = attention + _gate(settings) if routing else 0
    dense_layers = model.decoder_layers - moe_layers
    ffns = sum(_ffn(dim, width) for width in dense_ffn_widths(settings))
    embeddings = _embeddings(settings)
    largest = max(
        settings.vocabulary * model.decoder_input_dim,
        dim * max(dense_ffn_widths(settings), default=0),
        local * dim * model.moe_expert_ffn_dim,
    )
    return Parameters(
        embeddings=embeddings,
        dense_layer=attention + ffns // max(dense_layers, 1),
        moe_layer=moe_layer,
        dense=embeddings + dense_layers * attention + ffns + moe_layers * moe_layer,
        expert=expert,
        experts=experts,
        local_experts=local,
        moe_layers=moe_layers,
        largest=largest,
    )


def dense_ffn_widths(settings: Settings) -> list[int]:
    """Hidden width of every dense FFN; a FLOP-matched model has wide ones in place of experts."""
    model = settings.model
    if model.moe_freq and settings.routing is None:
        wide = model.decoder_layers // model.moe_freq
        narrow = model.decoder_layers - wide
        return [model.alternate_decoder_ffn_embed_dim] * wide + [
            model.decoder_ffn_embed_dim
        ] * narrow
    count = model.decoder_layers - len(moe_layer_numbers(settings))
    return [model.decoder_ffn_embed_dim] * count


def _ffn(dim: int, hidden: int) -> int:
    """Two linear maps with bias."""
    return 2 * dim * hidden + hidden + dim


def _attention(settings: Settings) -> int:
    """Four projections with bias and the two layer norms of a layer."""
    model = settings.model
    dim = model.decoder_embed_dim
    extra = 2 * dim * bool(model.scale_attn) + dim * bool(model.scale_resids)
    extra += model.decoder_attention_heads * bool(model.scale_heads)
    return 4 * (dim * dim + dim) + 2 * 2 * dim + extra


def _gate(settings: Settings) -> int:
    return describe_router(settings.model.decoder_embed_dim, settings.routing).num_parameters


def _embeddings(settings: Settings) -> int:
    """Token and position embeddings, projections to and from other widths, norms, output."""
    model, vocabulary = settings.model, settings.vocabulary
    dim, d_in, d_out = model.decoder_embed_dim, model.decoder_input_dim, model.decoder_output_dim
    count = vocabulary * d_in
    count += 2 * d_in * bool(model.use_stable_embedding)
    count += d_in * dim * (d_in != dim)
    if model.decoder_learned_pos and not model.no_token_positional_embeddings:
        count += (settings.tokens_per_sample + 2) * dim  # positions start after <pad> = 1
    count += 2 * dim * bool(model.layernorm_embedding)
    count += 2 * dim * (not model.no_decoder_final_norm)
    count += dim * d_out * (d_out != dim)
    if not model.share_decoder_input_output_embed:
        count += vocabulary * d_out
    return count
