"""Plans of the dense formulation: what fairseq's ``moe`` branch computes in place of this package.

Tokens are dispatched and combined by products with one-hot masks of [T, E, C] (GShard, arXiv
2006.16668), and attention goes through tables of scores, [B, heads, S, S]. Fully sharded, dense
parameters, their gradients and statistics are spread over the ranks; each layer is gathered for the
forward and for the backward pass, its gradients are reduce-scattered, once per forward pass and not
once per update (FairScale 0.4.0).

Bytes per element of the tables, b that of an element, reads and writes alike:

    masks, forward     two fp32 terms written, added (12), compared with zero (5), both cast to b
                       (5 + 2b): 8 + 12 + 5 + 5 + 2b
    masks, backward    gradient of b written, cast to fp32 (b + 4), read for both gates (8)
    scores, forward    product written (b), mask added (2b), softmax (2b), dropout (2b + 1),
                       read (b)
    scores, backward   gradient written (b), dropout (2b + 1), softmax (3b), read twice (2b), the
                       probabilities read (b)
"""

import dataclasses
from collections.abc import Iterator

from fairseq_tutel.plan.gpu_memory import Layer, count_memory, make_layers
from fairseq_tutel.plan.hardware import Hardware
from fairseq_tutel.plan.planner import Plan, make_plan
from fairseq_tutel.plan.settings import Settings
from fairseq_tutel.plan.speed import ring_time

# products with the masks: two forward; of dispatch's mask no gradient is asked for, so three back
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 3


def masks(settings: Settings) -> int:
    """Return T E C, the elements of the masks of an MoE layer."""
    capacity = settings.routing.capacity(settings.tokens, training=True)
    return settings.tokens * settings.routing.num_experts * capacity


def scores(settings: Settings) -> int:
    """Return B heads S S, the elements of the scores of any layer."""
    heads = settings.model.decoder_attention_heads
    return settings.batch_size * heads * settings.tokens_per_sample**2


def mask_flops(settings: Settings) -> float:
    """Return the FLOPs per token of one MoE layer's products with the masks, as computed."""
    passes = 2 if settings.model.checkpoint_activations else 1
    products = passes * _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    return products * 2 * masks(settings) * settings.model.decoder_embed_dim / settings.tokens


def mask_bytes(passes: int, element: int) -> int:
    """Return the bytes per element of the masks that are read and written, by the table above."""
    return passes * (30 + 2 * element) + 12 + 2 * element


def _table_time(settings: Settings, moe_layers: int, hardware: Hardware) -> float:
    """Return seconds of one update in which the tables are read and written."""
    b, model = settings.precision.element, settings.model
    passes = 2 if model.checkpoint_activations else 1
    moved = moe_layers * masks(settings) * mask_bytes(passes, b)
    moved += model.decoder_layers * scores(settings) * (passes * (8 * b + 1) + 9 * b + 1)
    return settings.update_freq * moved / hardware.stream


def _layers(settings: Settings, plan: Plan) -> Iterator[Layer]:
    """Yield layers with the tables that a backward pass needs, and their gradients."""
    b = settings.precision.element
    stack = make_layers(settings, plan.parameters, plan.traffic)
    for number, layer in enumerate(stack, start=1):
        kept = scores(settings) * (2 * b + 1)
        gradients = max(layer.gradients, scores(settings) * 2 * b)
        if number in settings.stacks[0].sparse:
            kept += masks(settings) * 2 * b
            gradients = max(gradients, masks(settings) * (b + 4))
        activations = layer.activations + kept
        yield dataclasses.replace(layer, activations=activations, gradients=gradients)


def make_dense_plan(settings: Settings, hardware: Hardware) -> Plan:
    """Plan a run of that branch; arguments as :func:`make_plan`.

    Raises:
        ValueError: as :func:`make_plan`; or the run is not a decoder with experts on several GPUs.
    """
    if not settings.routing or len(settings.stacks) > 1 or settings.gpus == 1:
        raise ValueError(
            "the dense formulation is planned for a decoder with experts on several GPUs, not for "
            f"gpus={settings.gpus} and {len(settings.stacks)} stacks"
        )
    plan = make_plan(settings, hardware)
    whole, time = plan.parameters, plan.time
    b, gpus = settings.precision.element, settings.gpus
    held = dataclasses.replace(whole, dense=-(-whole.dense // gpus),
                               embeddings=-(-whole.embeddings // gpus))  # fmt: skip
    layers = _layers(settings, plan)
    stack = [dataclasses.replace(each, parameters=each.parameters // gpus) for each in layers]
    memory = count_memory(settings, held, stack)
    # the largest piece of the dense parameters, gathered, and its gradient
    piece = 2 * b * max(whole.embeddings, whole.stacks[0].dense_layer, whole.stacks[0].moe_layer)
    size = 3 * settings.update_freq * b * whole.dense
    replaced = 2 * ring_time(plan.work.reduce_bytes, gpus, hardware.gpus_per_node, hardware)
    reduced = 2 * ring_time(size / 2, gpus, hardware.gpus_per_node, hardware)
    products = plan.work.tokens * whole.moe_layers * mask_flops(settings)
    return dataclasses.replace(
        plan,
        memory=dataclasses.replace(memory, at_peak={**memory.at_peak, "gathered piece": piece}),
        time=dataclasses.replace(
            time,
            matmul=time.matmul + products / hardware.product_rate(b),
            elementwise=time.elementwise + _table_time(settings, whole.moe_layers, hardware),
            optimizer=time.optimizer * held.per_gpu / whole.per_gpu,
            all_reduce=time.all_reduce - replaced + reduced,
        ),
    )
