"""What fairseq's ``moe`` branch did differently, to hold the planner against its published speeds.

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

from fairseq_tutel.plan.gpu_memory import count_memory, make_layers
from fairseq_tutel.plan.planner import make_plan
from fairseq_tutel.plan.speed import ring_time

# products with the masks: two forward; of dispatch's mask no gradient is asked for, so three back
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 3


def masks(settings):
    """T E C, elements of the masks of an MoE layer."""
    capacity = settings.routing.capacity(settings.tokens, training=True)
    return settings.tokens * settings.routing.num_experts * capacity


def scores(settings):
    """B heads S S, elements of the scores of any layer."""
    heads = settings.model.decoder_attention_heads
    return settings.batch_size * heads * settings.tokens_per_sample**2


def mask_flops(settings):
    """FLOPs per token of one MoE layer's products with the masks, as computed."""
    passes = 2 if settings.model.checkpoint_activations else 1
    products = passes * _FORWARD_PRODUCTS + _BACKWARD_PRODUCTS
    return products * 2 * masks(settings) * settings.model.decoder_embed_dim / settings.tokens


def _table_time(settings, moe_layers, hardware):
    """Seconds of one update in which the tables are read and written."""
    b, model = settings.precision.element, settings.model
    passes = 2 if model.checkpoint_activations else 1
    moved = moe_layers * masks(settings) * (passes * (30 + 2 * b) + 12 + 2 * b)
    moved += model.decoder_layers * scores(settings) * (passes * (8 * b + 1) + 9 * b + 1)
    return settings.update_freq * moved / hardware.stream


def _layers(settings, plan):
    """With the tables that a backward pass needs, and the gradients that it has of them."""
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


def plan_as_meta_computed(settings, hardware):
    """The plan of a run of that branch, on several GPUs."""
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
