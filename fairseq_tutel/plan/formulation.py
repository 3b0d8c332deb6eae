"""What fairseq's ``moe`` branch did differently, to hold the planner against its published speeds.

``formulation=dense``: tokens are dispatched and combined by products with one-hot masks of
[T, E, C] (GShard, arXiv 2006.16668), and attention goes through tables of scores, [B, heads, S, S].
``ddp=fully_sharded``: dense parameters, their gradients and statistics are spread over the ranks;
each layer is gathered for the forward and for the backward pass, its gradients are
reduce-scattered, once per forward pass and not once per update (FairScale 0.4.0).

Bytes per element of the tables, b that of an element, reads and writes alike:

    masks, forward     two fp32 terms written, added (12), compared with zero (5), both cast to b
                       (5 + 2b): 8 + 12 + 5 + 5 + 2b
    masks, backward    gradient of b written, cast to fp32 (b + 4), read for both gates (8)
    scores, forward    product written (b), mask added (2b), softmax (2b), dropout (2b + 1),
                       read (b)
    scores, backward   gradient written (b), dropout (2b + 1), softmax (3b), read twice (2b), the
                       probabilities read (b)
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .parameters import Parameters
from .settings import Settings

# products with the masks: two forward; of dispatch's mask no gradient is asked for, so three back
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 3


@dataclass(frozen=True)
class Tables:
    """Elements of one layer's tables, and bytes that each takes.

    Attributes:
        masks: T E C, of an MoE layer.
        scores: B heads S S, of any layer.
        kept_masks, kept_scores: bytes per element that the backward pass needs.
        gradient_masks, gradient_scores: bytes per element of gradients in the backward pass.
    """

    masks: int
    scores: int
    kept_masks: int
    kept_scores: int
    gradient_masks: int
    gradient_scores: int


def tables(settings: Settings) -> Tables:
    """Those of a run; nothing in the sparse formulation."""
    if not settings.is_dense_formulation:
        return Tables(0, 0, 0, 0, 0, 0)
    routing, b, tokens = settings.routing, settings.precision.element, settings.tokens
    capacity = routing.capacity(tokens, training=True) if routing else 0
    heads = settings.model.decoder_attention_heads
    return Tables(
        masks=tokens * routing.num_experts * capacity if routing else 0,
        scores=settings.batch_size * heads * settings.tokens_per_sample**2,
        kept_masks=2 * b,
        kept_scores=2 * b + 1,
        gradient_masks=b + 4,
        gradient_scores=2 * b,
    )


def mask_flops(settings: Settings) -> float:
    """FLOPs per token of one MoE layer's products with the masks, as computed."""
    if not settings.is_dense_formulation or not settings.routing:
        return 0.0
    passes = 2 if settings.model.checkpoint_activations else 1
    products = passes * _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    one = 2 * tables(settings).masks * settings.model.decoder_embed_dim / settings.tokens
    return products * one


def table_time(settings: Settings, parameters: Parameters, hardware: Hardware) -> float:
    """Seconds of one update in which the tables are read and written."""
    sizes, b, model = tables(settings), settings.precision.element, settings.model
    passes = 2 if model.checkpoint_activations else 1
    masks = passes * (30 + 2 * b) + 12 + 2 * b
    scores = passes * (8 * b + 1) + 9 * b + 1
    moved = parameters.moe_layers * sizes.masks * masks
    moved += model.decoder_layers * sizes.scores * scores
    stream = hardware.memory_bandwidth * hardware.memory_efficiency
    return settings.update_freq * moved / stream


def kept_bytes(settings: Settings, parameters: Parameters) -> int:
    """Of all layers' tables that a backward pass needs, if nothing is recomputed."""
    sizes = tables(settings)
    masks = parameters.moe_layers * sizes.masks * sizes.kept_masks
    return masks + settings.model.decoder_layers * sizes.scores * sizes.kept_scores


def sharded_bytes(settings: Settings, parameters: Parameters) -> int:
    """Dense parameters that pass a GPU in one update, three times per forward pass; else 0."""
    if not settings.is_fully_sharded or settings.gpus == 1:
        return 0
    return 3 * settings.update_freq * settings.precision.element * parameters.dense


def held_parameters(settings: Settings, parameters: Parameters) -> int:
    """Parameters of which a GPU holds weight, gradient and statistics."""
    if not settings.is_fully_sharded:
        return parameters.per_gpu
    return parameters.local + -(-parameters.dense // settings.gpus)


def gathered_bytes(settings: Settings, parameters: Parameters) -> int:
    """The largest piece of the dense parameters, gathered, and its gradient; 0 if replicated."""
    if not settings.is_fully_sharded or settings.gpus == 1:
        return 0
    piece = max(parameters.embeddings, parameters.dense_layer, parameters.moe_layer)
    return 2 * settings.precision.element * piece
