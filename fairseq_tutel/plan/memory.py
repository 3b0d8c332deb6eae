"""Memory of one GPU, by kind, as formulas over what autograd keeps.

Kept per token of a layer, element size b (the tensors that the layers of fairseq and of this
package save for the backward pass on a GPU, attention through the memory-efficient kernel, which
keeps no table of scores):

    attention      M of: norm's input, its output, q, k, v, result, result in sentence order,
                   next norm's input, next norm's output (dense) or its sentence-ordered copy
                   (MoE); a dropout mask of 1 byte; log-sum-exp of the scores, 4 bytes per head
    dense FFN      input of the activation, 4 F for gelu (fairseq computes it in fp32); its output,
                   b F; a dropout mask of 1 byte
    gate           logits, 4 E
    shared expert  input and output of the activation, 2 b F
    experts        per row of the dispatch buffer: rows received, b M; input and output of the
                   activation, 2 b F; output, b M. With r-flow there are r times as many of both
    weights        that r-flow has gathered for the layer, b each

and with ``formulation=dense`` the tables of :mod:`.formulation`.

With ``checkpoint_activations`` a layer keeps its input only, b M per token, and one layer at a
time is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .flow import make_flow
from .formulation import gathered_bytes, held_parameters, tables
from .parameters import Parameters, moe_layer_numbers
from .settings import Settings

# Elements of legacy_ddp's all-reduce buffer (fairseq's LegacyDistributedDataParallel).
LEGACY_DDP_BUFFER = 2**28


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights, gradients: in the training precision.
        master: fp32 copies of weights and gradients, where the mode has them.
        optimizer: Adam's statistics.
        activations: kept for the backward pass, gathered weights included, without the dispatch
            buffers.
        dispatch: rows of model width sent to and received from experts, kept or at work.
        logits: logits, log-probabilities and their gradients at the turning point.
        working: what the backward pass of one layer needs on top of what the forward pass kept:
            gradients of activations, and with checkpointing the layer's recomputation.
        communication: buffer of the gradient all-reduce.
        gathered: one layer's expert weights, as r-flow gathers them; part of ``activations`` and
            ``working``, where their gradients are, too.
        peak_phase: when most is alive: at the loss, in the backward pass, in the update.
        at_peak: bytes by kind that are alive then.
        without_checkpointing: activations and dispatch buffers if nothing were recomputed.
    """

    weights: int
    gradients: int
    master: int
    optimizer: int
    activations: int
    dispatch: int
    logits: int
    working: int
    communication: int
    gathered: int
    peak_phase: str
    at_peak: dict[str, int]
    without_checkpointing: int

    @property
    def peak(self) -> int:
        """The most that is alive at one time."""
        return sum(self.at_peak.values())

    @property
    def states(self) -> int:
        """Weights, gradients, fp32 copies and statistics: what does not depend on the batch."""
        return self.weights + self.gradients + self.master + self.optimizer


@dataclass(frozen=True)
class Layer:
    """One layer on one GPU.

    Attributes:
        parameters: number of its parameters here.
        activations, dispatch: bytes it saves for the backward pass when nothing is recomputed.
        kept: bytes of those that stay between forward and backward pass.
        working: bytes that its backward pass needs beside ``kept``.
    """

    parameters: int
    activations: int
    dispatch: int
    kept: int
    working: int


def dispatch_rows(settings: Settings) -> int:
    """R, rows of the dispatch buffer of one GPU: E C with a fixed capacity, else K T.

    Without a fixed capacity the number of received rows depends on the routing; K T is the mean
    over the GPUs, of which N null experts, chosen as often as others, take their share N / (E + N).
    """
    routing, tokens = settings.routing, settings.tokens
    capacity = routing.capacity(tokens, training=True)
    if capacity is None or not routing.is_static(training=True):
        return -(-routing.top_k * tokens * routing.num_experts // routing.num_outputs)
    return routing.num_experts * capacity


def layers(settings: Settings, parameters: Parameters) -> list[Layer]:
    """The layers from the bottom up."""
    moe_numbers = moe_layer_numbers(settings)
    dense = _layer(settings, parameters.dense_layer, *_dense_bytes(settings))
    if not moe_numbers:
        return [dense] * settings.model.decoder_layers
    here = parameters.moe_layer + parameters.local // parameters.moe_layers
    gathered = make_flow(settings, parameters).gathered * settings.precision.element
    moe = _layer(settings, here, *_moe_bytes(settings, parameters), gathered)
    return [
        moe if number in moe_numbers else dense
        for number in range(1, settings.model.decoder_layers + 1)
    ]


def _attention_bytes(settings: Settings) -> int:
    model, b = settings.model, settings.precision.element
    dim, mask = model.decoder_embed_dim, int(model.dropout > 0)
    kept = settings.tokens * ((9 * b + mask) * dim + 4 * model.decoder_attention_heads)
    sizes = tables(settings)
    return kept + sizes.scores * sizes.kept_scores


def _dense_bytes(settings: Settings) -> tuple[int, int, int]:
    """(activations, dispatch buffers, gradients of activations) of a dense layer."""
    model, tokens, b = settings.model, settings.tokens, settings.precision.element
    hidden = model.decoder_ffn_embed_dim
    if model.moe_freq and settings.routing is None:
        hidden = max(hidden, model.alternate_decoder_ffn_embed_dim)
    saved_input, gradients = {
        # fairseq's gelu: fp32 input, and in its backward pass fp32 gradients of both sides
        "gelu": (4, 6 if b == 2 else 4),
        # its output is the input that fc2 saves
        "relu": (0, 2 * b),
    }.get(str(model.activation_fn), (b, b))
    mask = int(model.dropout > 0) * model.decoder_embed_dim
    ffn = tokens * (hidden * (saved_input + b) + mask)
    sizes = tables(settings)
    widest = max(tokens * hidden * gradients, sizes.scores * sizes.gradient_scores)
    return _attention_bytes(settings) + ffn, 0, widest


def _moe_bytes(settings: Settings, parameters: Parameters) -> tuple[int, int, int]:
    """(activations, dispatch buffers, gradients of activations) of an MoE layer.

    In the backward pass of the experts' activation four tensors of its size are alive (input and
    output, both gradients), where two were saved; two row buffers are left, as many as were saved.
    """
    model, b = settings.model, settings.precision.element
    rows, dim, hidden = dispatch_rows(settings), model.decoder_embed_dim, model.moe_expert_ffn_dim
    gate = settings.tokens * 4 * settings.routing.num_outputs
    copies = make_flow(settings, parameters).copies
    sizes = tables(settings)
    shared = settings.tokens * 2 * b * model.moe_shared_expert_ffn_dim
    kept = gate + rows * 2 * b * hidden + shared + sizes.masks * sizes.kept_masks
    widest = max(
        rows * b * max(copies * dim, 2 * hidden),
        shared,
        sizes.scores * sizes.gradient_scores,
        sizes.masks * sizes.gradient_masks,
    )
    return _attention_bytes(settings) + kept, rows * 2 * copies * b * dim, widest


def _layer(
    settings: Settings,
    parameters: int,
    activations: int,
    dispatch: int,
    gradients: int,
    gathered: int = 0,
) -> Layer:
    model = settings.model
    if not model.checkpoint_activations:
        kept = activations + dispatch + gathered
        return Layer(parameters, activations, dispatch, kept, gradients + gathered)
    kept = settings.tokens * settings.precision.element * model.decoder_embed_dim
    # the input that is kept is also the first tensor that the recomputation saves
    working = activations + dispatch + gradients + 2 * gathered - kept
    return Layer(
        parameters, activations, dispatch, 0 if model.offload_activations else kept, working
    )


def count_memory(settings: Settings, parameters: Parameters) -> Memory:
    """Memory of one GPU of a run."""
    model, precision, tokens = settings.model, settings.precision, settings.tokens
    b, per_gpu = precision.element, held_parameters(settings, parameters)
    stack = layers(settings, parameters)
    # input of the output projection and of the norm before it
    ends = tokens * b * (model.decoder_embed_dim + model.decoder_output_dim)
    kept = sum(layer.kept for layer in stack) + ends
    saved = sum(layer.activations + layer.dispatch for layer in stack) + ends
    dispatch = max(layer.dispatch for layer in stack)
    if not model.checkpoint_activations:
        dispatch = sum(layer.dispatch for layer in stack)
        kept -= dispatch
    # log-softmax: fp32 result, its gradient, and the gradient of the logits (fp16: in fp16)
    logits = tokens * settings.vocabulary * (10 if "fp16" in precision.name else 12)
    gradients = b * per_gpu
    master = 8 * per_gpu if precision.master_copies else 0
    optimizer = 2 * precision.statistic * per_gpu
    communication = _communication(settings, parameters)
    always = {"weights": gradients, "fp32 copies": master, "optimizer statistics": optimizer}
    # Gradients are freed before each update and come back during its first backward pass.
    accumulated = gradients if settings.update_freq > 1 else 0
    held = kept + (0 if model.checkpoint_activations else dispatch)
    # the gradient of the token embedding, last of all, before it is added to that of the output
    embedding = b * settings.vocabulary * model.decoder_input_dim
    scratch = max(communication + _scratch(settings, parameters), embedding)
    phases = {
        "loss": {
            "gradients": accumulated,
            "activations": held,
            "logits": logits,
            "buffers": gathered_bytes(settings, parameters),
        },
        "backward": max(_backward(settings, parameters, stack), key=_total),
        "update": {"gradients": gradients, "buffers": scratch},
    }
    peak_phase = max(phases, key=lambda name: _total(phases[name]))
    return Memory(
        weights=b * per_gpu,
        gradients=gradients,
        master=master,
        optimizer=optimizer,
        activations=kept,
        dispatch=dispatch,
        logits=logits,
        working=max(layer.working for layer in stack),
        communication=communication,
        gathered=make_flow(settings, parameters).gathered * b,
        peak_phase=peak_phase,
        at_peak={**always, **phases[peak_phase]},
        without_checkpointing=saved,
    )


def _total(kinds: dict[str, int]) -> int:
    return sum(kinds.values())


def _backward(
    settings: Settings, parameters: Parameters, stack: list[Layer]
) -> Iterator[dict[str, int]]:
    """What is alive in the backward pass of each layer, by kind, from the top down.

    Layers above have given their gradients and freed what they kept.
    """
    b = settings.precision.element
    gradients = parameters.embeddings
    kept = sum(layer.kept for layer in stack)
    for layer in reversed(stack):
        gradients += layer.parameters
        whole = settings.update_freq > 1 or settings.is_fully_sharded
        alive = held_parameters(settings, parameters) if whole else gradients
        yield {
            "gradients": b * alive,
            "activations": kept,
            "working set of a layer": layer.working,
            "buffers": gathered_bytes(settings, parameters),
        }
        kept -= layer.kept


def _communication(settings: Settings, parameters: Parameters) -> int:
    """Buffer of the all-reduce of dense gradients: one of fixed size, or buckets of them all."""
    if settings.gpus == 1:
        return 0
    if settings.is_fully_sharded:
        return gathered_bytes(settings, parameters)
    if settings.ddp_backend in ("legacy_ddp", "no_c10d", "fully_sharded"):
        return settings.precision.element * min(LEGACY_DDP_BUFFER, parameters.per_gpu)
    return settings.precision.element * parameters.dense


def _scratch(settings: Settings, parameters: Parameters) -> int:
    """Temporaries of the optimizer: none in the fused kernel, fp32 copies in fairseq's Adam."""
    if settings.precision.statistic == 2:
        return 0
    copies = 3 if settings.precision.element == 2 and not settings.precision.master_copies else 1
    return 4 * copies * parameters.largest
