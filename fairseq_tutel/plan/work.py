"""Floating-point operations and bytes on the wire of one update, per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .flow import make_flow
from .memory import dispatch_rows
from .parameters import Parameters, dense_ffn_widths
from .settings import Settings


@dataclass(frozen=True)
class Work:
    """What one GPU computes and sends in one update.

    Attributes:
        tokens: per GPU and update.
        capacity: C, rows per expert and GPU of one forward pass; None without a limit.
        model_flops: per token, forward and backward, of what the model needs: K experts per token,
            no recomputation; the numerator of model FLOPs utilisation.
        hardware_flops: per token, as computed: every row of the capacity, recomputation.
        exchange_bytes: that one GPU hands to one all-to-all, its own part included.
        exchange_peers: GPUs that take part in it, itself included; 1 without expert parallelism.
        exchanges: all-to-alls per update.
        reduce_bytes: dense gradients, all-reduced once per update.
        replica_bytes: gradients of expert parameters that several GPUs hold, all-reduced.
        replicas: GPUs that hold the same experts, or slices of them.
    """

    tokens: int
    capacity: int | None
    model_flops: float
    hardware_flops: float
    exchange_bytes: int
    exchange_peers: int
    exchanges: int
    reduce_bytes: int
    replica_bytes: int
    replicas: int

    @property
    def bytes_per_peer(self) -> float:
        """Bytes from one GPU to one other in one all-to-all."""
        return self.exchange_bytes / self.exchange_peers

    @property
    def exchange_bytes_per_update(self) -> float:
        """Bytes that leave one GPU in all all-to-alls of an update."""
        leaving = self.exchange_bytes - self.bytes_per_peer
        return leaving * self.exchanges


def count_work(settings: Settings, parameters: Parameters) -> Work:
    """Operations and traffic of a run.

    A matrix product of n x k by k x m counts 2 n k m. Attention scores count in full, not halved
    for the causal mask, as is usual (PaLM, arXiv 2204.02311, appendix B) and as fairseq computes
    them. A backward pass costs twice the forward pass. Recomputation repeats the layers, with their
    all-to-alls, not the output projection.
    """
    model, routing = settings.model, settings.routing
    dim, layers = model.decoder_embed_dim, model.decoder_layers
    attention = layers * (8 * dim * dim + 4 * settings.tokens_per_sample * dim)
    ffn = 4 * dim * sum(dense_ffn_widths(settings))
    output = 2 * model.decoder_output_dim * settings.vocabulary
    chosen = computed = gate = 0.0
    rows = 0
    if routing:
        rows = dispatch_rows(settings)
        gate = parameters.moe_layers * 2 * dim * routing.num_outputs
        ffn += parameters.moe_layers * 4 * dim * model.moe_shared_expert_ffn_dim
        one_expert = parameters.moe_layers * 4 * dim * model.moe_expert_ffn_dim
        chosen = routing.top_k * routing.num_experts / routing.num_outputs * one_expert
        computed = rows / settings.tokens * one_expert
    dense = attention + ffn + gate
    passes = 4 if model.checkpoint_activations else 3
    flow = make_flow(settings, parameters)
    peers = flow.exchange_ranks if routing else 1
    per_pass = (6 if model.checkpoint_activations else 4) * parameters.moe_layers
    replicas = settings.gpus // settings.exchange_peers if routing else 1
    shared = parameters.unsliced if parameters.slices > 1 else parameters.expert
    shared *= parameters.local_experts * parameters.moe_layers
    b = settings.precision.element
    return Work(
        tokens=settings.tokens * settings.update_freq,
        capacity=routing.capacity(settings.tokens, training=True) if routing else None,
        model_flops=3.0 * (dense + chosen + output),
        hardware_flops=passes * (dense + computed) + 3.0 * output,
        exchange_bytes=flow.copies * rows * dim * b,
        exchange_peers=peers,
        exchanges=per_pass * settings.update_freq if peers > 1 else 0,
        reduce_bytes=parameters.dense * b if settings.gpus > 1 else 0,
        replica_bytes=shared * b if replicas > 1 else 0,
        replicas=replicas,
    )
