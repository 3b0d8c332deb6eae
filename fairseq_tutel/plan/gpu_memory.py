"""Memory of one GPU, by kind, from formulas for what autograd keeps.

The layers of fairseq and of this package save these bytes per token for the backward pass on a GPU,
with element size b. The memory-efficient attention kernel keeps no table of scores:

    attention      M of: norm's input, its output, q, k, v, result, result in sentence order,
                   next norm's input, next norm's output (dense) or its sentence-ordered copy
                   (MoE); a dropout mask of 1 byte; log-sum-exp of the scores, 4 bytes per head
    to a source    M of: q, k, v, result in sentence order, next norm's input and output; a dropout
                   mask; tables of the scores (fairseq computes this one step by step): softmax in
                   fp32, the same cast to b if that is less, with dropout its result and mask
    dense FFN      input of the activation, 4 F for gelu (fairseq computes it in fp32); its output,
                   b F; a dropout mask of 1 byte
    gate           logits, 4 E
    shared expert  input and output of the activation, 2 b F
    conditional    a dense FFN, and the two outputs that are mixed, 2 b M
    experts        per row of the dispatch buffer: rows received, b M; input and output of the
                   activation, 2 b F (3 b F if gated); output, b M. With expert parallelism r there
                   are r times as many rows. ``activation_memory`` lean keeps the input of the
                   activation, and rows from other GPUs; minimal keeps neither
    weights        b for each number that expert parallelism gathers for the layer, and for those of
                   helped experts (``balance_ranks``)

With ``checkpoint_activations`` a layer keeps only its input, b M per token, and one layer at a time
is recomputed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..moe.memory import routed_bytes
from .parameters import Parameters, StackParameters
from .settings import Run, Settings, Stack
from .work import Traffic

# Elements of legacy_ddp's all-reduce buffer (fairseq's LegacyDistributedDataParallel).
LEGACY_DDP_BUFFER = 2**28


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    optimizer: int  # Adam's statistics
    states: int  # weights, gradients, fp32 copies and statistics
    activations: int  # kept for the backward pass, with gathered weights, without ``dispatch``
    dispatch: int  # rows sent to and received from experts, kept or in use
    logits: int  # logits, log-probabilities and their gradients between the two passes
    gathered: int  # gathered expert weights of one layer; part of ``activations``
    again: int  # what experts compute again in the backward pass by ``activation_memory``
    peak_phase: str  # phase with the most bytes alive: "loss", "backward" or "update"
    at_peak: dict[str, int]  # bytes alive at the peak, by kind
    without_checkpointing: int  # activations and dispatch buffers if nothing were recomputed

    @property
    def peak(self) -> int:
        """Most bytes that are alive at one time."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Layer:
    """One layer on one GPU, in bytes."""

    parameters: int  # number of its parameters here
    activations: int  # saved for the backward pass when nothing is recomputed
    dispatch: int  # buffers of rows saved for it
    gradients: int  # of activations, alive at once in its backward pass
    again: int = 0  # what experts compute again by ``activation_memory``
    gathered: int = 0  # gathered expert weights, and those of helped experts
    # bytes of its input if the layer is recomputed; 0 if the input is kept on the host
    checkpoint: int | None = None

    @property
    def kept(self) -> int:
        """Bytes that stay between forward and backward pass."""
        if self.checkpoint is None:
            return self.activations + self.dispatch + self.gathered
        return self.checkpoint

    @property
    def working(self) -> int:
        """Bytes that the layer's backward pass needs besides ``kept``."""
        if self.checkpoint is None:
            return self.gradients + self.gathered
        # the kept input is also the first tensor that the recomputation saves
        again = self.activations + self.dispatch + 2 * self.gathered - self.checkpoint
        return self.gradients + again


def make_layers(settings: Settings, parameters: Parameters, traffic: Traffic) -> list[Layer]:
    """Return the layers from the bottom up."""
    stacks = zip(settings.stacks, parameters.stacks, traffic.gathered, strict=True)
    return [layer for each in stacks for layer in _layers_of_stack(settings, traffic, *each)]


def _layers_of_stack(
    settings: Settings, traffic: Traffic, stack: Stack, counted: StackParameters, gathered: int
) -> list[Layer]:
    model, b = settings.model, settings.precision.element
    checkpoint = None
    if model.checkpoint_activations:
        on_gpu = not model.offload_activations
        checkpoint = settings.tokens * b * stack.dim * on_gpu
    ffn, gradients = _ffn_bytes(settings, stack, max(stack.dense_widths, default=0))
    kept = _attention_bytes(settings, stack) + ffn
    dense = Layer(counted.dense_layer, kept, 0, gradients, checkpoint=checkpoint)
    if not stack.sparse:
        return [dense] * stack.layers
    here = counted.moe_layer + counted.local
    sizes = _moe_bytes(settings, stack, counted, traffic)
    held = (gathered + _helped(settings, counted, traffic)) * b
    moe = Layer(here, *sizes, gathered=held, checkpoint=checkpoint)
    return [moe if n in stack.sparse else dense for n in range(1, stack.layers + 1)]


def _helped(settings: Settings, counted: StackParameters, traffic: Traffic) -> int:
    """Return numbers of the experts that a GPU helps if one GPU has twice the mean rows."""
    others = traffic.exchange_ranks - 1
    if not (settings.exchange.balance_ranks and others):
        return 0
    busy = settings.routing.num_experts / traffic.exchange_ranks
    return math.ceil(busy / 2 / others) * counted.expert


def _attention_bytes(settings: Settings, stack: Stack) -> int:
    model, b = settings.model, settings.precision.element
    mask = int(model.dropout > 0)
    per_token = (9 * b + mask) * stack.dim + 4 * stack.heads
    if stack.attentions > 1:
        table = 4 + (b if b < 4 else 0) + (b + 1 if model.attention_dropout > 0 else 0)
        scores = stack.heads * settings.tokens_per_sample
        per_token += (6 * b + mask) * stack.dim + scores * table
    return settings.tokens * per_token


def _ffn_bytes(settings: Settings, stack: Stack, hidden: int) -> tuple[int, int]:
    """Return (activations, gradients of activations) of a stock FFN."""
    model, tokens, b = settings.model, settings.tokens, settings.precision.element
    saved_input, gradients = {
        # fairseq's gelu: fp32 input, and in its backward pass fp32 gradients of both sides
        "gelu": (4, 6 if b == 2 else 4),
        # its output is the input that fc2 saves
        "relu": (0, 2 * b),
    }.get(str(model.activation_fn), (b, b))
    mask = int(model.dropout > 0) * stack.dim
    return tokens * (hidden * (saved_input + b) + mask), tokens * hidden * gradients


def _moe_bytes(
    settings: Settings, stack: Stack, counted: StackParameters, traffic: Traffic
) -> tuple[int, int, int, int]:
    """Return (activations, dispatch buffers, gradients, computed again) of an MoE layer.

    The backward pass of the experts' activation has its inputs, its output and their gradients at
    once, and as many row buffers as were saved: two.
    """
    b = settings.precision.element
    routed = routed_bytes(
        tokens=settings.tokens,
        outputs=settings.routing.num_outputs,
        rows=traffic.rows,
        destinations=traffic.destinations,
        model_dim=stack.dim,
        hidden=counted.hidden,
        hidden_dim=stack.expert_dim,
        shared_dim=settings.model.moe_shared_expert_ffn_dim,
        element=b,
        memory=settings.activation_memory,
        communicates=traffic.exchange_ranks > 1,
    )
    kept = _attention_bytes(settings, stack) + routed.gate + routed.hidden + routed.shared
    widest = routed.working
    if stack.conditional:
        dense, gradients = _ffn_bytes(settings, stack, stack.conditional)
        kept += dense + 2 * settings.tokens * b * stack.dim
        widest = max(widest, gradients)
    return kept, routed.rows, widest, routed.again


def count_memory(settings: Settings, parameters: Parameters, stack: list[Layer]) -> Memory:
    """Count the memory of one GPU from what its layers keep."""
    model, precision, tokens = settings.model, settings.precision, settings.tokens
    b, per_gpu = precision.element, parameters.per_gpu
    # inputs of the output projection and of the norm before it; for an encoder, input and output of
    # its last norm
    ends = tokens * b * (model.decoder_embed_dim + model.decoder_output_dim)
    ends += tokens * b * 2 * sum(each.dim for each in settings.stacks if each.side == "encoder")
    held = kept = sum(layer.kept for layer in stack) + ends
    dispatch = max(layer.dispatch for layer in stack)
    if not model.checkpoint_activations:
        dispatch = sum(layer.dispatch for layer in stack)
        kept -= dispatch
    # log-softmax: fp32 result, its gradient, and the gradient of the logits (fp16: in fp16)
    logits = tokens * settings.vocabulary * (10 if "fp16" in precision.name else 12)
    weights = gradients = b * per_gpu
    states = _states(settings, parameters)
    # Gradients are freed before each update and come back during its first backward pass.
    accumulated = gradients if settings.update_freq > 1 else 0
    phases = {
        "loss": {"gradients": accumulated, "activations": held, "logits": logits},
        "backward": max(_backward(settings, parameters, stack), key=_total),
        "update": {"gradients": gradients, "buffers": _update_buffers(settings, parameters)},
    }
    peak_phase = max(phases, key=lambda name: _total(phases[name]))
    return Memory(
        weights=weights,
        optimizer=states["optimizer statistics"],
        states=_total(states) + gradients,
        activations=kept,
        dispatch=dispatch,
        logits=logits,
        gathered=max(layer.gathered for layer in stack),
        again=sum(layer.again for layer in stack),
        peak_phase=peak_phase,
        at_peak={**states, **phases[peak_phase]},
        without_checkpointing=sum(layer.activations + layer.dispatch for layer in stack) + ends,
    )


def memory_of_update(run: Run, parameters: Parameters) -> dict[str, int]:
    """Return bytes by kind while the weights are updated, which parameters alone decide.

    Of a model whose layers have no formulas here, this is the least that a step needs.
    """
    return {
        **_states(run, parameters),
        "gradients": run.precision.element * parameters.per_gpu,
        "buffers": _optimizer_buffers(run, parameters),
    }


def _states(run: Run, parameters: Parameters) -> dict[str, int]:
    precision, per_gpu = run.precision, parameters.per_gpu
    return {
        "weights": precision.element * per_gpu,
        "fp32 copies": 8 * per_gpu if precision.master_copies else 0,
        "optimizer statistics": 2 * precision.statistic * stepped_parameters(run, parameters),
    }


def stepped_parameters(run: Run, parameters: Parameters) -> int:
    """Return how many parameters have optimizer statistics on the GPU that has most."""
    return parameters.local + (parameters.owned if run.zero_sharding else parameters.dense)


def _total(kinds: dict[str, int]) -> int:
    return sum(kinds.values())


def _backward(
    settings: Settings, parameters: Parameters, stack: list[Layer]
) -> Iterator[dict[str, int]]:
    """Yield what is alive in the backward pass of each layer, by kind, from the top down.

    Layers above have produced their gradients and freed what they kept.
    """
    b = settings.precision.element
    gradients = parameters.embeddings
    kept = sum(layer.kept for layer in stack)
    for layer in reversed(stack):
        gradients += layer.parameters
        alive = parameters.per_gpu if settings.update_freq > 1 else gradients
        yield {"gradients": b * alive, "activations": kept, "working set of a layer": layer.working}
        kept -= layer.kept


def _update_buffers(settings: Settings, parameters: Parameters) -> int:
    """Return bytes of buffers while the weights are updated.

    These are the all-reduce buffer of dense gradients and the temporaries of the optimizer; or, if
    that is larger, the gradient of the token embedding before it is added to that of the output
    projection.
    """
    tied = settings.precision.element * settings.vocabulary * settings.model.decoder_input_dim
    return max(_optimizer_buffers(settings, parameters), tied)


def _optimizer_buffers(run: Run, parameters: Parameters) -> int:
    precision, b = run.precision, run.precision.element
    communication = b * parameters.dense  # in buckets
    if run.gpus == 1:
        communication = 0
    elif run.ddp_backend in ("legacy_ddp", "no_c10d", "fully_sharded"):
        communication = b * min(LEGACY_DDP_BUFFER, parameters.per_gpu)
    # temporaries: none in the fused kernel, fp32 copies in fairseq's Adam
    copies = 3 if b == 2 and not precision.master_copies else 1
    return communication + (0 if precision.statistic == 2 else 4 * copies * parameters.largest)
