"""Operations and traffic of one GPU in an update: rows sent to experts, and gathered weights.

:func:`~fairseq_tutel.distributed.expert_parallelism` decides which ranks exchange rows and gather
weights (switchable parallelism, arXiv 2206.03382, section 3.1). Per GPU and layer, with L rows, P
numbers of an expert, and S = W/E GPUs that hold each expert whole (``replicated``) or in slices
(``sliced``):

    placement, r           exchange with  rows sent  weights gathered from  numbers gathered
    replicated, r = 1      E              L          none                   0
    replicated, r = 0      none           0          E                      E P
    sliced, 1 <= r <= S    rE             rL         S/r, rE GPUs apart     P / r (r = S: 0)
    sliced, r = 0          none           0          all                    E P

E >= W counts as replicated, with W in place of E GPUs. So do expert groups, with their P ranks. A
GPU with all experts gathers nothing. Gradients travel back in the same number. The number of
products does not depend on r: r times the rows, and 1/r of the hidden units.
"""

import math
from dataclasses import dataclass

from ..distributed import expert_parallelism
from .parameters import Parameters, StackParameters
from .settings import Run, Settings, Stack


@dataclass(frozen=True)
class Traffic:
    """Rows and weights of one MoE layer that travel; zero in a dense model."""

    rows: int = 0  # R, rows of the dispatch buffer
    destinations: int = 1  # GPUs that each row goes to; the layer keeps as many copies
    exchange_ranks: int = 1  # GPUs that exchange rows, 1 if none
    gather_ranks: int = 1  # GPUs whose weights each GPU gathers, 1 if none
    gather_stride: int = 1  # distance between neighbouring GPUs of a gather
    # for each stack: numbers per layer that a GPU holds after a gather, including its own
    gathered: tuple[int, ...] = ()

    @property
    def sent(self) -> int:
        """Rows that a GPU passes to an exchange, including those that stay."""
        return self.rows * self.destinations


def count_traffic(settings: Settings, parameters: Parameters) -> Traffic:
    """Count the traffic of a run.

    Raises:
        ValueError: r does not fit the number of GPUs and experts.
    """
    if parameters.groups is None:
        return Traffic(gathered=(0,) * len(parameters.stacks))
    way = expert_parallelism(parameters.groups, settings.exchange.r)
    gather_ranks = way.gather_size

    def gathered(stack: StackParameters) -> int:
        if gather_ranks == 1 or not stack.moe_layers:
            return 0
        numbers = math.prod(way.gathered) * stack.sliceable // parameters.slices
        return numbers + (parameters.experts * stack.unsliced if way.r == 0 else 0)

    ranks = way.exchange_groups.ep_size
    stride = ranks if way.r else 1
    rows = settings.routing.dispatch_rows(settings.tokens)
    held = tuple(map(gathered, parameters.stacks))
    return Traffic(rows, way.num_destinations, ranks, gather_ranks, stride, held)


def active_parameters(run: Run, parameters: Parameters) -> float:
    """Return the parameters that a token uses: all dense ones and those of its K experts."""
    if not run.routing:
        return parameters.dense
    met = sum(stack.moe_layers * stack.expert for stack in parameters.stacks)
    return parameters.dense + chosen_experts(run) * met


def chosen_experts(settings: Run) -> float:
    """Return how many experts a token uses per layer: K, less the share of null experts."""
    routing = settings.routing
    return routing.top_k * routing.num_experts / routing.num_outputs


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one GPU in one update."""

    tokens: int  # per GPU and update
    capacity: int | None  # C, rows per expert and GPU of one forward pass; None without a limit
    # per token, forward and backward, with K experts and without recomputation: the numerator
    # of model FLOPs utilisation
    model_flops: float
    hardware_flops: float  # per token, with every row of the capacity and with recomputation
    # sent by one GPU in one all-to-all, including its own part; the larger of two stacks
    exchange_bytes: int
    exchange_peers: int  # GPUs in one all-to-all
    exchanges: int  # all-to-alls per update
    reduce_bytes: int  # dense gradients, all-reduced once per update
    replica_bytes: int  # gradients of expert parameters that several GPUs hold, all-reduced
    replicas: int  # GPUs that hold the same experts, or slices of them

    @property
    def bytes_per_peer(self) -> float:
        """Bytes from one GPU to one other in one all-to-all."""
        return self.exchange_bytes / self.exchange_peers


def _dense_flops(settings: Settings, stack: Stack) -> float:
    """Return FLOPs of one token's forward pass through a stack, without its routed experts."""
    dim, sparse = stack.dim, len(stack.sparse)
    # keys and values of the other stack's tokens may have another width
    other = settings.stacks[0].dim if stack.attentions > 1 else 0
    flops = 8 * dim * dim + 4 * settings.tokens_per_sample * dim
    if other:
        flops += 4 * dim * dim + 4 * other * dim + 4 * settings.tokens_per_sample * dim
    flops = stack.layers * flops + 4 * dim * sum(stack.dense_widths)
    if sparse:
        flops += sparse * 2 * dim * settings.routing.num_outputs
        flops += sparse * 4 * dim * (settings.model.moe_shared_expert_ffn_dim + stack.conditional)
        flops += sparse * 2 * dim * settings.model.moe_shared_expert_gate
    return flops


def count_work(settings: Settings, parameters: Parameters, traffic: Traffic) -> Work:
    """Count operations and traffic of a run.

    A matrix product of n x k by k x m counts 2 n k m. Attention scores count in full, not halved
    for the causal mask, as is usual (PaLM, arXiv 2204.02311, appendix B) and as fairseq computes
    them. A backward pass costs twice the forward pass. Recomputation repeats the layers and their
    all-to-alls, not the output projection; ``activation_memory`` minimal those of rows to experts
    and the experts' first products. In an encoder-decoder a token is one of the target and
    one of the source.
    """
    model, routing = settings.model, settings.routing
    output = 2 * model.decoder_output_dim * settings.vocabulary
    dense = chosen = computed = first = 0.0
    minimal = settings.activation_memory.mode == "minimal"
    for stack, counted in zip(settings.stacks, parameters.stacks, strict=True):
        dense += _dense_flops(settings, stack)
        if counted.moe_layers:
            one_expert = counted.moe_layers * 2 * counted.products
            chosen += chosen_experts(settings) * one_expert
            expert_flops = traffic.rows / settings.tokens * one_expert
            computed += expert_flops
            if minimal:
                first += expert_flops * (1 - stack.expert_dim / counted.hidden)
    again = bool(model.checkpoint_activations)
    peers = traffic.exchange_ranks
    replicas = settings.gpus // settings.exchange_peers if routing else 1
    shared = sum(
        each.moe_layers * (each.unsliced if parameters.slices > 1 else each.expert)
        for each in parameters.stacks
    )
    shared *= parameters.local_experts
    widest = max((stack.dim for stack in settings.stacks if stack.sparse), default=0)
    b = settings.precision.element
    return Work(
        tokens=settings.tokens * settings.update_freq,
        capacity=routing.capacity(settings.tokens, training=True) if routing else None,
        model_flops=3.0 * (dense + chosen + output),
        hardware_flops=(3 + again) * (dense + computed) + first + 3.0 * output,
        exchange_bytes=traffic.sent * widest * b,
        exchange_peers=peers,
        exchanges=(4 + 2 * again + minimal)
        * parameters.moe_layers
        * settings.update_freq
        * (peers > 1),
        reduce_bytes=parameters.dense * b if settings.gpus > 1 else 0,
        replica_bytes=shared * b if replicas > 1 else 0,
        replicas=replicas,
    )
