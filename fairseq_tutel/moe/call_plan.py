"""Decide once per call how the rows reach the experts, who computes them, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import ops
from ..distributed import ExchangeRecord
from ..distributed.exchanges import stream_of
from .chunks import Chunk, arrange, to_parts
from .exchange_choice import ExchangeChoice
from .experts import ExpertBank
from .helped_experts import balanced
from .links import Link
from .routing import Routing
from .source_dropout import SourceDropout
from .torch_modes import is_observed


class Travels(NamedTuple):
    """Tensors that the backward pass sends to the experts' ranks, in the order of the rows."""

    d_out_RM: torch.Tensor  # gradients of the outputs, or of the tokens
    weight_R1: torch.Tensor | None  # weights of the rows, if these are gradients of tokens
    rows_RM: torch.Tensor | None  # the rows, unless they were kept


class CallPlan(NamedTuple):
    """Plan of one call."""

    experts: Callable[..., torch.Tensor]
    calls_experts: bool  # call the experts as a module, even if they have a network
    prepared: Any  # PreparedExperts, or None if the experts prepare themselves
    weight_TK: Any  # fp32 [T, K]
    expert_TK: Any  # int32 [T, K]
    maps: tuple[Any, ...]  # dest_row_TK, src_pair_R in the order of sending
    chunks: Sequence[Chunk]
    link: Link
    drop: SourceDropout | None  # dropout of the outputs on the tokens' rank
    late_bias: bool  # combine may add the experts' last bias
    memory: ops.ActivationMemory | None  # kept by a network; None: nothing

    @property
    def has_network(self) -> bool:
        """Whether a network computes the rows; else the experts are called."""
        prepared = None if self.calls_experts else self.prepared
        return prepared is not None and prepared.network is not None

    @property
    def is_operator(self) -> bool:
        """Whether one operator computes the whole call."""
        alone = self.link.exchange.groups.ep_size == 1 and self.drop is None
        return alone and self.prepared.network.is_operator

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the operator's arguments beside the tokens."""
        params = self.prepared.network.operands(self.prepared.params)
        return self.weight_TK, *self.maps, self.expert_TK, *params

    @property
    def operator_options(self) -> dict[str, Any]:
        return {
            "offsets": self.chunks[0].offsets,
            "options": self.prepared.network.options,
            "memory": self.memory,
            "late_bias": self.late_bias,
        }

    @property
    def keeps_outputs(self) -> bool:
        return self.memory is not None and self.memory.outputs

    @property
    def keeps_rows(self) -> bool:
        """Whether a chunk's rows are kept: with the outputs, or since they came from afar."""
        if self.memory is None or self.memory.outputs:
            return self.memory is not None
        return self.memory.hidden and self.link.exchange.groups.ep_size > 1

    def kept_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk's rows as they are kept, and the scales of fp8 rows."""
        if self.memory is None or not self.keeps_rows:
            return rows.new_empty(0), rows.new_empty(0)
        return self.memory.store(rows, rows.shape[-1])

    def dropped(self, out_RM: torch.Tensor) -> torch.Tensor:
        """Apply the dropout on the tokens' rank to outputs or their gradients."""
        return out_RM if self.drop is None else self.drop(out_RM, *self.maps)

    def gradients(
        self, dy_TM: torch.Tensor, x_TM: torch.Tensor, weight_TK: torch.Tensor, out_RM: torch.Tensor
    ) -> tuple[Travels, torch.Tensor | None]:
        """Return what the backward pass sends, and the weights' gradient if it is known here."""
        if self.keeps_outputs:
            dest_row_TK, src_pair_R = self.maps
            d_out_RM, d_weight_TK = ops.combine_bwd(
                dy_TM, out_RM, dest_row_TK, src_pair_R, weight_TK
            )
            return Travels(self.dropped(d_out_RM), None, None), d_weight_TK
        d_out_RM = self.dropped(ops.dispatch(dy_TM, *self.maps))
        weight_R1 = ops.row_weights(weight_TK, self.maps[1])[:, None]
        rows_RM = None if self.keeps_rows else ops.dispatch(x_TM, *self.maps)
        return Travels(d_out_RM, weight_R1, rows_RM), None


def plan_call(
    model_dim: int,
    dtype: torch.dtype,
    routing: Routing,
    experts: Any,
    choice: ExchangeChoice,
    record: ExchangeRecord | None,
) -> CallPlan:
    """Return the plan of a call on rows of a width and dtype.

    Collective where weights or counts of rows travel.

    Wrapped experts, and experts whose calls somebody observes, are called. Wrappers of
    torch.compile and checkpointing forward the attributes of the bank.
    """
    exchange, parallelism = choice.exchange, choice.parallelism
    helps = choice.balances and not routing.padded
    gathers = not parallelism.is_replicated and experts.can_be_gathered
    direct = isinstance(experts, ExpertBank) and not is_observed(experts)
    on_meta = not (direct or routing.dest_row_TK.is_meta)
    if on_meta and any(param.is_meta for param in experts.parameters()):
        raise ValueError(f"the experts' weights are on the meta device: {ops.HOW_TO_OFFLOAD}")
    prepared = drop = counted = None
    if gathers or (direct and not helps):
        prepared = experts.prepare(dtype, parallelism if gathers else None)
    if gathers and prepared is not None:
        p = prepared.dropout_at_source
        drop = SourceDropout.draw(model_dim, routing, parallelism, p) if p else None
        routing = to_parts(routing, parallelism.num_destinations)
    memory = getattr(experts, "memory", ExpertBank.memory)  # a wrapper may not forward it
    if helps:
        routing, experts, counted = balanced(routing, experts, choice, model_dim, dtype, record)
    maps, chunks = arrange(routing, exchange, choice.overlap_degree, counted)
    stream = stream_of(routing.dest_row_TK.device) if len(chunks) > 1 else None
    return CallPlan(
        experts,
        helps or not direct,
        prepared,
        routing.topk_weight_TK,
        routing.expert_TK,
        maps,
        chunks,
        Link(exchange, stream, record),
        drop,
        late_bias=parallelism.is_replicated,
        memory=memory,
    )
