"""The MoE layer: agree, route, dispatch, experts, combine.

Each step is one object: what the ranks agree on (:class:`~fairseq_tutel.distributed.StepSettings`),
the router (:mod:`.routers`, chosen by name), the dispatcher, the experts. The options reach all of
them as one frozen :class:`~fairseq_tutel.config.MoEConfig`.
The letters of shapes are those of the glossary in ``fairseq_tutel/README.md``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..config import ExchangeConfig, MoEConfig
from ..distributed import (
    Exchange,
    ExpertParallelGroups,
    StepAgreement,
    StepSettings,
    TimedExchange,
    refuse_plain_ddp,
    shared_groups,
    sync_step,
)
from .autocast import autocast_dtype
from .balance import balance_over_ranks
from .dispatcher import dispatch_and_combine
from .exchange_choices import ExchangeChoice, ExchangeChoices, refuse_own_experts
from .experts import ExpertList, Experts
from .metrics import MoEAux
from .output_masks import mask_tokens
from .region_timer import timed
from .routers import Router, make_router, route_by_module
from .routing import RouterStep
from .shared_expert import SharedExpert
from .wire import WireExchange, row_bytes


class MoELayer(nn.Module):
    """A sparse feed-forward layer: each token goes to K of E experts.

    Alone::

        layer = MoELayer(model_dim=256, num_experts=8, hidden_dim=1024, top_k=2)
        y, aux = layer(x, return_aux=True)
        loss = task_loss(y) + 0.01 * aux.loss

    Args:
        model_dim: M.
        num_experts: E, over all ranks. It and ``**routing`` are a shorthand for ``config``.
        hidden_dim: F of the built-in experts, 4*M by default.
        config: all options of routing, in place of ``num_experts`` and ``**routing``.
        activation: of the built-in experts: gelu, relu, swish, tanh, ...
        gate: a :class:`~fairseq_tutel.moe.routers.Router` in place of the one that
            ``config.router`` names; or any module [T, M] -> logits [T, E]. Such a module is called
            like any other, with tokens of the dtype of ``x`` and under the caller's autocast state;
            half logits are cast to fp32 before anything is computed from them.
        experts: this rank's expert modules, each [n, M] -> [n, M], in place of the built-in ones;
            as many as ``groups.num_local_experts``.
        groups: placement of the experts, from :func:`~fairseq_tutel.distributed.build_groups`; by
            default over all ranks of torch.distributed (then building the layer is a collective
            call), or all here.
        shared_expert_dim: > 0: hidden dimension of an expert that every token goes to as well
            (:class:`~fairseq_tutel.moe.shared_expert.SharedExpert`); its output is added.
        dropout, activation_dropout: inside the built-in experts.
        seed: of the built-in experts' initial weights.
        exchange: how tokens travel between ranks, the same on all of them: an
            :class:`~fairseq_tutel.config.ExchangeConfig`, or the name of an algorithm.
        record_exchange_time: fill in the two times of :class:`MoEAux` (slow, and without overlap).
        skip_exchange: leave out the all-to-alls, for benchmarks; the results are then wrong.
        **routing: fields of :class:`~fairseq_tutel.config.MoEConfig`, such as ``top_k``.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int | None = None,
        hidden_dim: int | None = None,
        *,
        config: MoEConfig | None = None,
        activation: str = "gelu",
        gate: nn.Module | None = None,
        experts: Sequence[nn.Module] | None = None,
        groups: ExpertParallelGroups | None = None,
        shared_expert_dim: int = 0,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        seed: int | None = None,
        exchange: ExchangeConfig | str = "linear",
        record_exchange_time: bool = False,
        skip_exchange: bool = False,
        **routing,
    ):
        super().__init__()
        self.config = _one_config(config, num_experts, routing)
        self.model_dim = model_dim
        self.groups = _groups_for(self.config.num_experts, groups)
        self._checked_ddp = not self.groups.agrees
        self.record_exchange_time = record_exchange_time
        # one after the other where they are timed, or their times would be those of experts
        self._choices = ExchangeChoices(
            self.groups, one_at_a_time=record_exchange_time, skip=skip_exchange
        )
        self.exchange_config, self.exchange, self._flow = self._choices.prepare(exchange)
        if gate is not None and not isinstance(gate, nn.Module):
            raise ValueError(f"gate must be a module, got {gate!r}; router='cosine' chooses a gate")
        self.gate = gate if gate is not None else make_router(model_dim, self.config)
        if experts is not None:
            self.experts: Experts | ExpertList = _custom_experts(experts, self.groups)
            refuse_own_experts(self.experts, self._flow)
        else:
            self.experts = Experts(
                self.groups.local_experts,
                model_dim,
                4 * model_dim if hidden_dim is None else hidden_dim,
                activation=activation,
                activation_dropout=activation_dropout,
                dropout=dropout,
                seed=seed,
                # the experts of a simulated rank are compared with no other's
                draw_on_cpu=not self.groups.simulated,
                hidden_slice=(self.groups.slice_index, self.groups.num_slices),
                num_holders=self.groups.num_replicas,
            )
        self.shared_expert = None
        if shared_expert_dim:
            self.shared_expert = SharedExpert(
                model_dim, shared_expert_dim, activation, activation_dropout, dropout
            )

    def forward(
        self,
        x: torch.Tensor,
        *,
        pad_mask: torch.Tensor | None = None,
        step: StepAgreement | None = None,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        exchange: ExchangeConfig | str | None = None,
        r: int | None = None,
        return_aux: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, MoEAux]:
        """Apply the layer.

        Args:
            x: [..., M]; the number of tokens may be zero and may differ between ranks. Under
                ``torch.autocast`` the experts compute in its dtype, the gate's logits stay fp32.
            pad_mask: bool [...], True for padding; looked at only with ``use_pad_mask``.
            step: what :func:`~fairseq_tutel.distributed.sync_step` returned for this forward pass;
                made here if None (one small all-gather). Whoever gives it also passes all layers'
                reports to :func:`~fairseq_tutel.moe.balance_over_ranks`.
            top_k, capacity_factor: for this call only; the same on all ranks. A ``step`` must have
                been made with them: ``sync_step(T, layer.step_settings(dtype, top_k=...), groups)``
            exchange: for this call only, in the same way; one that the layer was built with or that
                was given to :meth:`prepare_exchanges`, with any degree of overlap, wire formats and
                r.
            r: that of the exchange (Tutel's ``adaptive_r``), in the same way.
            return_aux: also return the aux loss and the counts that metrics are made of.

        Returns:
            y [..., M], or (y, :class:`MoEAux`).

        Raises:
            ValueError: wrong width, options out of range, ranks that disagree, a ``step`` that was
                agreed on with another ``top_k``, ``capacity_factor``, ``exchange`` or ``r``, an
                exchange that was not prepared, or a plain DistributedDataParallel around.
        """
        self._check(x)
        config = self._config_for_call(top_k, capacity_factor)
        if exchange is None and step is not None:
            exchange = step.exchange
        choice = self._choice_for_call(exchange, r)
        refuse_own_experts(self.experts, choice.flow)
        given_TM, x_TM = self._tokens(x)
        pad_mask_T = None if pad_mask is None else pad_mask.reshape(-1)

        router_step = self._agree(x_TM, config, choice, step, x.shape[:-2].numel())
        if isinstance(self.gate, Router):
            routing, router_aux = self.gate(x_TM, pad_mask_T, router_step)
        else:
            routing, router_aux = route_by_module(self.gate, given_TM, pad_mask_T, router_step)
        used = self._exchange_for(routing, router_step, x_TM, choice)
        region = functools.partial(
            dispatch_and_combine,
            routing=routing,
            experts=self.experts,
            exchange=used,
            overlap_degree=_overlap_degree(choice),
            flow=choice.flow,
        )
        y_TM = timed(None if step is None else step.timer, region, x_TM, routing)
        if self.shared_expert is not None:
            y_TM = y_TM + self.shared_expert(x_TM)
        y_TM = mask_tokens(y_TM, config.final_output_masking, self.training)

        wire_sums = None
        if isinstance(choice.exchange, WireExchange):
            wire_sums = choice.exchange.errors.take(x.device, gradients=self.training)
        y = y_TM.view(x.shape)
        if not return_aux:
            return y
        aux = MoEAux(
            *router_aux[:3],
            prob_sum_E=router_aux.prob_sum_E,
            bias_counts=router_aux.bias_counts,
            num_null_KN=router_aux.num_null_KN,
            num_full_K=routing.num_full_K,
            num_routed_KE=routing.num_routed_KE,
            num_kept_per_expert_E=routing.num_kept_per_expert_E,
            num_tokens=x_TM.shape[0],
            num_slots=routing.num_experts * routing.capacity if routing.padded else 0,
            **_times(used),
            wire_sums=wire_sums,
        )
        return y, aux if step is not None else balance_over_ranks([aux], config)[0]

    def step_settings(
        self,
        dtype: torch.dtype,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        exchange: ExchangeConfig | str | None = None,
        r: int | None = None,
    ) -> StepSettings:
        """What ranks must have in common for their exchanges to fit together.

        Args:
            dtype: of the experts' rows.
            top_k, capacity_factor, exchange, r: as given to the call that is to be agreed on.
        """
        config = self._config_for_call(top_k, capacity_factor)
        return self._settings(config, self._choice_for_call(exchange, r).config, dtype)

    def prepare_exchanges(self, exchanges: Iterable[ExchangeConfig | str]) -> None:
        """Build what calls with these exchanges need, such as process groups.

        A collective call of all ranks, in one order, before training: inside a step a rank that
        chose alone would wait for the others for ever. What is built stays.

        Raises:
            ValueError: an unknown name, or ranks that gave different ones.
        """
        for exchange in exchanges:
            self._choices.prepare(exchange)

    def _settings(
        self, config: MoEConfig, exchange: ExchangeConfig, dtype: torch.dtype
    ) -> StepSettings:
        return StepSettings(
            num_experts=config.num_experts,
            null_experts=config.null_experts,
            top_k=config.top_k,
            model_dim=self.model_dim,
            mode="training" if self.training else "evaluation",
            capacity_factor=config.capacity_factor,
            eval_capacity_factor=config.eval_capacity_factor,
            eval_capacity_token_fraction=config.eval_capacity_token_fraction,
            exchange=exchange,
            dtype=dtype,
        )

    def _choice_for_call(self, exchange, r) -> ExchangeChoice:
        given = self.exchange_config if exchange is None else ExchangeConfig.of(exchange)
        if r is not None and r != given.r:
            given = dataclasses.replace(given, r=r)
        if given is self.exchange_config:
            return ExchangeChoice(given, self.exchange, self._flow)
        return self._choices.of(given)

    def _agree(self, x_TM, config, choice, step, num_sequences) -> RouterStep:
        """What all ranks do in this call; communicates unless ``step`` holds it."""
        exchange = choice.config
        if step is None:
            settings = self._settings(config, exchange, x_TM.dtype)
            step = sync_step(x_TM.shape[0], settings, self.groups)
        elif step.settings is not None and (
            config is not self.config or exchange not in (self.exchange_config, step.exchange)
        ):
            # ranks would exchange parts of a size that they did not compare; an agreement may be
            # older than the autocast that decides the dtype, but all else must hold
            wanted = self._settings(config, exchange, step.settings.dtype)
            for label, (value, agreed) in wanted.differences(step.settings).items():
                raise ValueError(
                    f"this call's options make {label} {value}, but the ranks' agreement for this "
                    f"step has {agreed}; give the same options to step_settings()"
                )
        compact = exchange.wire_compact and choice.exchange.groups.ep_size > 1
        return RouterStep(config, self.training, step.num_tokens, num_sequences, compact)

    def _exchange_for(self, routing, step, x_TM, choice) -> Exchange:
        """The exchange for messages of this call's size, measured if that is asked for."""
        # at most, and the same on all ranks
        rows = step.config.top_k * step.num_tokens
        if routing.padded:
            rows = routing.num_experts * routing.capacity
        size = choice.flow.copies * rows * row_bytes(choice.config, x_TM.shape[1], x_TM.dtype)
        exchange = choice.exchange.for_message(size // _overlap_degree(choice))
        return TimedExchange(exchange) if self.record_exchange_time else exchange

    def _check(self, x) -> None:
        if x.shape[-1] != self.model_dim:
            raise ValueError(
                f"the layer was built for model_dim={self.model_dim}, the input has {x.shape[-1]}"
            )
        if not (self._checked_ddp or torch.compiler.is_compiling()):
            self._checked_ddp = True
            refuse_plain_ddp(self.experts)

    def _tokens(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        """The input as [T, M], as it was given and in the dtype that the experts compute in."""
        given_TM = x.reshape(-1, self.model_dim)
        if self.training and self.config.input_dropout > 0:
            given_TM = nn.functional.dropout(given_TM, self.config.input_dropout)
        dtype = autocast_dtype(x.device)
        return given_TM, given_TM if dtype is None else given_TM.to(dtype)

    def _config_for_call(self, top_k, capacity_factor) -> MoEConfig:
        changes = {}
        if top_k is not None:
            changes["top_k"] = top_k
        if capacity_factor is not None:
            if self.training:
                changes["capacity_factor"] = capacity_factor
            else:
                changes["eval_capacity_factor"] = capacity_factor
                changes["eval_capacity_token_fraction"] = 0.0  # it would win over the factor
        return dataclasses.replace(self.config, **changes) if changes else self.config

    def extra_repr(self) -> str:
        groups = self.groups
        simulated = " (simulated)" if groups.simulated else ""
        return (
            f"experts={groups.num_experts} on {groups.world_size} ranks{simulated}, "
            f"top_k={self.config.top_k}"
        )


def _one_config(config, num_experts, routing) -> MoEConfig:
    """The options, from whichever way they were given."""
    if config is None:
        if num_experts is None:
            raise ValueError("an MoE layer needs num_experts, or a config")
        return MoEConfig(num_experts=num_experts, **routing)
    if num_experts not in (None, config.num_experts) or routing:
        given = {"num_experts": num_experts, **routing}
        raise ValueError(f"config holds all options of routing; given beside it: {given}")
    return config


def _overlap_degree(choice: ExchangeChoice) -> int:
    """1 where there is nothing to overlap with."""
    return choice.config.overlap_degree if choice.exchange.groups.ep_size > 1 else 1


def _times(exchange) -> dict[str, float]:
    """Of the two forward exchanges, where they were measured."""
    if not isinstance(exchange, TimedExchange):
        return {}
    return {"exchange_cpu_ms": exchange.cpu_ms, "exchange_cuda_ms": exchange.cuda_ms}


def _groups_for(num_experts, groups) -> ExpertParallelGroups:
    groups = groups if groups is not None else shared_groups(num_experts)
    if groups.num_experts != num_experts:
        raise ValueError(
            f"groups were built for {groups.num_experts} experts, the layer has {num_experts}"
        )
    return groups


def _custom_experts(experts, groups) -> ExpertList:
    if not isinstance(experts, Sequence | nn.ModuleList):
        raise ValueError(f"experts must be a list of modules, got {type(experts).__name__}")
    if len(experts) != groups.num_local_experts:
        raise ValueError(
            f"{len(experts)} expert modules given, but this rank holds "
            f"{groups.num_local_experts} of {groups.num_experts} experts"
        )
    if groups.num_slices > 1:
        raise ValueError(
            f"experts={type(experts[0]).__name__}: modules of one's own cannot be cut into the "
            f"{groups.num_slices} slices of placement='sliced'; use placement='replicated'"
        )
    return ExpertList(experts)
