"""The MoE layer: agree, route, dispatch, experts, combine.

The letters of shapes are those of the glossary in ``fairseq_tutel/README.md``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import distributed
from ..config import ExchangeConfig, ExpertConfig, MoEConfig
from . import arguments
from .balance import balance_over_ranks
from .dispatcher import dispatch_and_combine
from .exchange_choice import ExchangeChoice, ExchangeChoices
from .experts import (
    ExpertBank,
    ExpertList,
    OwnExperts,
    SharedExpert,
    make_experts,
    own_experts,
    with_width,
)
from .given_choices import steer, top_k_of
from .memory import StepMemory, memory_of_step
from .pass_state import pass_state
from .reports import MoEAux, RouterAux, make_aux
from .requests import Requests, serve
from .routers import Router, jitter_tokens, make_router, route_logits
from .routing import RouterCall, Routing, mask_of_tokens, mask_tokens, with_real_counts
from .torch_modes import autocast_dtype, untraced, without_autocast
from .update_load import UpdateLoad

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .typed_options import LayerOptions


class MoELayer(nn.Module):
    """Sparse feed-forward layer: each token goes to K of E experts.

    >>> import torch
    >>> from fairseq_tutel.moe import MoELayer
    >>> _ = torch.manual_seed(0)
    >>> layer = MoELayer(model_dim=16, num_experts=8, hidden_dim=64, top_k=2)
    >>> x = torch.randn(4, 10, 16)
    >>> y, aux = layer(x, return_aux=True)
    >>> y.shape, int(aux.load_E.sum())  # 40 tokens, 2 experts each
    (torch.Size([4, 10, 16]), 80)
    >>> (y.square().mean() + 0.01 * aux.loss).backward()

    Args:
        model_dim (int): M, width of the tokens (default None: of your experts' first linear layer).
        num_experts (int): E, experts over all ranks (default None: given by ``config``).
        hidden_dim (int): F, hidden dimension of the built-in experts (default None: 4*M).
        config (MoEConfig): all options of routing in one (default None: given singly).
        preset (str): "balanced", recommended options of routing, or "meta", those of Meta's code;
            single options win (default None: MoEConfig's).
        gate (nn.Module): a :class:`~fairseq_tutel.moe.routers.Router`, or a module that maps
            [T, M] to logits [T, E], under the caller's autocast, which are cast to fp32 (default
            None: the router that ``config.router`` names).
        experts (ExpertConfig, list of nn.Module or function): options of built-in experts, or your
            own: all modules [n, M] -> [n, M] of this rank, a function that makes one, or an
            ``ExpertBank`` (default None: built-in, with options given singly).
        groups (ExpertParallelGroups): placement of the experts, from ``distributed.build_groups``
            (default None: spread over all ranks; then the constructor is collective).
        seed (int): seed of experts' initial weights (default None: drawn from torch's generator).
        exchange (ExchangeConfig or str): how tokens travel between ranks, or an algorithm's name;
            the same on all ranks (default "linear").
        record_exchange_time (bool): measure exchanges, slowly and without overlap (default False).
        skip_exchange (bool): leave out the all-to-alls: wrong, for benchmarks (default False).
        compute_aux (bool): compute losses and counts in training even if ``return_aux=False``
            (default True; False is faster).
        layer_index (int): number of the layer in its model; ``local_drop`` reads it (default 0).
        **options: single fields of :class:`~fairseq_tutel.config.MoEConfig`, such as ``top_k``, and
            of :class:`~fairseq_tutel.config.ExpertConfig`, such as ``activation``,
            ``expert_network``, ``dropout``, ``shared_expert_dim``, ``activation_memory`` and
            ``expert_storage``. ``expert_fn`` is ``experts`` as a function.

    Raises:
        ValueError: an option is out of range, or two arguments contradict each other.
        TypeError: an option is unknown, or ``model_dim`` is not given and there are no own experts.
    """

    def __init__(
        self,
        model_dim: int | None = None,
        num_experts: int | None = None,
        hidden_dim: int | None = None,
        *,
        config: MoEConfig | None = None,
        preset: str | None = None,
        gate: nn.Module | None = None,
        experts: ExpertConfig | OwnExperts | None = None,
        groups: distributed.ExpertParallelGroups | None = None,
        seed: int | None = None,
        exchange: ExchangeConfig | str = "linear",
        record_exchange_time: bool = False,
        skip_exchange: bool = False,
        compute_aux: bool = True,
        layer_index: int = 0,
        **options: Unpack[LayerOptions],
    ):
        super().__init__()
        *names, _ = inspect.signature(MoELayer).parameters
        of_routing, of_experts = arguments.by_config(options, names)
        self.config = arguments.routing_config(config, num_experts, of_routing, preset)
        network, own = arguments.expert_config(experts, of_experts, hidden_dim)
        self.layer_index, self.compute_aux = layer_index, compute_aux
        self.update_load = UpdateLoad()
        self.requests = Requests()
        self.groups = arguments.groups_for(self.config.num_experts, groups)
        bank, model_dim = with_width(model_dim, own, self.groups, seed)
        self.model_dim = model_dim
        self._checked_wrapper = (0, 0)
        self._configs = arguments.CallConfigs()
        self._choices = ExchangeChoices(self.groups, timed=record_exchange_time, skip=skip_exchange)
        self.exchange_choice = self._choices.prepare(exchange)
        if gate is None:
            gate = make_router(model_dim, self.config)
        self.gate = arguments.own_gate(gate, self.config)
        self._gate_routes = isinstance(self.gate, Router)  # still true if the gate is wrapped later
        if own is None:
            hidden_dim = 4 * model_dim if hidden_dim is None else hidden_dim
            dims = model_dim, hidden_dim
            self.experts: ExpertBank = make_experts(network, self.groups, *dims, seed)
        else:
            self.experts = bank or own_experts(own, self.groups, seed)
        self.exchange_choice.refuse_own_experts(self.experts)
        self.exchange_choice.refuse_capacity(self.config)
        arguments.refuse_local_drop_of_slices(self.config, self.groups)
        self.shared_expert = SharedExpert(model_dim, network) if network.shared_expert_dim else None
        distributed.expect_reduction(self, self.groups)

    def __setstate__(self, state):
        super().__setstate__(state)
        distributed.expect_reduction(self, self.groups)  # a copy is prepared by itself

    def forward(
        self,
        x: torch.Tensor,
        *,
        pad_mask: torch.Tensor | None = None,
        choices: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        step: distributed.StepAgreement | None = None,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        exchange: ExchangeConfig | str | None = None,
        r: int | None = None,
        record: distributed.ExchangeRecord | None = None,
        return_aux: bool = False,
        balance_later: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, MoEAux]:
        """Apply the layer.

        ``top_k``, ``capacity_factor``, ``exchange`` and ``r`` change options for this call, on all
        ranks. A ``step`` must have been agreed on with these options (:meth:`step_settings`).

        Args:
            x (Tensor): [..., M]. The experts compute in autocast's dtype; logits stay fp32.
            pad_mask (Tensor): bool [...], True for padding: no expert (default None: no padding).
            choices (Tensor): integers [..., K], experts of the tokens (default None: the router's).
            weights (Tensor): [..., K], weights of ``choices`` (default None: the gate's).
            step (StepAgreement): result of ``distributed.sync_step`` for this forward pass (default
                None: made here by a small all-gather). With it, call ``balance_over_ranks``.
            top_k (int): experts per token (default None: the layer's).
            capacity_factor (float): capacity factor (default None: the layer's).
            exchange (ExchangeConfig or str): prepared by :meth:`prepare_exchanges` (default None).
            r (int): ranks that each token goes to (default None: the exchange's).
            record (ExchangeRecord): gets times and errors of exchanges (default None: a new one).
            return_aux (bool): also return losses and counts (default False). Otherwise they are
                not computed in evaluation under ``torch.no_grad``, nor with ``compute_aux=False``.
            balance_later (bool): leave ``balance_over_ranks`` to the caller (default False).

        Returns:
            y [..., M], or (y, :class:`MoEAux`).

        Raises:
            ValueError: wrong width or choices; options out of range; ranks that disagree; exchange
                not prepared; plain DistributedDataParallel or ``fully_shard`` around the layer.
        """
        options = {
            "pad_mask": pad_mask, "choices": choices, "weights": weights, "step": step,
            "top_k": top_k, "capacity_factor": capacity_factor, "exchange": exchange, "r": r,
            "record": record, "return_aux": return_aux, "balance_later": balance_later,
        }  # fmt: skip
        return serve(self, x, options) if self.requests.served else self._compute(x, **options)

    def _compute(
        self, x, *, pad_mask, choices, weights, step, top_k, capacity_factor, exchange, r, record,
        return_aux, balance_later, recorder=None, padding=None,
    ) -> torch.Tensor | tuple[torch.Tensor, MoEAux]:  # fmt: skip
        """Apply the layer with the arguments of :meth:`forward`; the recorder gets the choices.

        ``padding`` is the batch's (:class:`~.padding.Padding`).
        """
        top_k = top_k_of(choices, top_k, self.config)
        config, choice = self._resolve(step, top_k, capacity_factor, exchange, r)
        steering = steer(choices, weights, config, x.shape[:-1], x.device, recorder)
        given_TM, x_TM = self._tokens(x, config.input_dropout if self.training else 0.0)
        reports = ("later" if balance_later else "now") if return_aux else "not asked for"
        agreed = self._agree(config, choice, x_TM, step, reports)
        uncounted_T, num_tokens = None, len(x_TM)
        if padding is not None:
            pad_mask, uncounted_T, num_tokens = padding.of_call(x, pad_mask, config)
        call = self._router_call(config, choice, agreed, x, return_aux, steering, uncounted_T)
        routing, router_aux = self._route(given_TM, x_TM, pad_mask, call, x.shape[:-1])
        y_TM, record = self._through_experts(x_TM, routing, call, choice, agreed, record)
        y_TM = self._finish(y_TM, x_TM, config)
        y = y_TM.view(*x.shape[:-1], y_TM.shape[-1])  # a bank of one's own may change the width
        if not return_aux:
            return y
        load = self.update_load.of_call() if config.balance_scope == "update" else None
        aux = make_aux(router_aux, with_real_counts(routing, call), num_tokens, record, load)
        by_caller = step is not None or balance_later
        return y, aux if by_caller else balance_over_ranks([aux])[0]

    def step_settings(
        self, dtype: torch.dtype, *, top_k=None, capacity_factor=None, exchange=None, r=None
    ) -> distributed.StepSettings:
        """Return the settings that ranks must share in a call; ``dtype`` is that of the rows."""
        config, choice = self._resolve(None, top_k, capacity_factor, exchange, r)
        state = pass_state(self.experts, choice, self.training)
        return self._settings(config, choice, dtype, state)

    def memory_of_step(self, num_tokens: int, dtype: torch.dtype | None = None) -> StepMemory:
        """Estimate the memory of a training step through this layer on its device.

        >>> from fairseq_tutel.moe import MoELayer
        >>> need = MoELayer(64, num_experts=8, hidden_dim=256).memory_of_step(num_tokens=1024)
        >>> need.kinds["weights"]  # bytes
        1060864

        Args:
            num_tokens (int): T with padding, of the largest rank.
            dtype (torch.dtype): dtype of the rows (default None: that of the weights).

        Returns:
            StepMemory: bytes by kind; without a fixed capacity the mean over the ranks.
        """
        return memory_of_step(self, num_tokens, dtype)

    @property
    def exchange(self) -> distributed.Exchange:
        """The layer's own exchange."""
        return self.exchange_choice.exchange

    @property
    def exchange_config(self) -> ExchangeConfig:
        """The options of the layer's own exchange."""
        return self.exchange_choice.config

    def prepare_exchanges(self, exchanges: Iterable[ExchangeConfig | str]) -> None:
        """Build process groups for calls with these exchanges. Collective; call before training."""
        for exchange in exchanges:
            self._choices.prepare(exchange)

    def _resolve(
        self, step, top_k, capacity_factor, exchange, r
    ) -> tuple[MoEConfig, ExchangeChoice]:
        """Return the routing options and the exchange of a call."""
        config, choice = self.config, self.exchange_choice
        if top_k is not None or capacity_factor is not None:
            config = self._configs.of_call(config, top_k, capacity_factor, self.training)
        exchange = exchange or (step and step.exchange)
        if exchange is not None or r is not None:
            choice = self._choices.for_call(choice, exchange, r)
            choice.refuse_own_experts(self.experts)
        choice.refuse_capacity(config)
        return config, choice

    def _tokens(self, x, dropout) -> tuple[torch.Tensor, torch.Tensor]:
        """Flatten ``x`` [..., M] to tokens [T, M], and apply the dropout of the input.

        Return the tokens in the dtype of ``x``, and in that of the experts (autocast's, if any).
        """
        if x.shape[-1] != self.model_dim:
            raise ValueError(
                f"the layer was built for model_dim={self.model_dim}, the input has {x.shape[-1]}"
            )
        given_TM = x if x.dim() == 2 else x.reshape(-1, self.model_dim)
        if dropout > 0:
            given_TM = nn.functional.dropout(given_TM, dropout)
        dtype = autocast_dtype(x.device)
        return given_TM, given_TM if dtype is None else given_TM.to(dtype)

    def _agree(self, config, choice, x_TM, step, reports) -> distributed.StepAgreement:
        """Return what the ranks agreed on for this call; collective without a step."""
        if not torch.compiler.is_compiling():
            seen, check = self._checked_wrapper, distributed.refuse_plain_wrapper
            self._checked_wrapper = check(self.experts, self.groups, seen)
        if step is None:
            if not self.groups.needs_sync:
                return distributed.StepAgreement(x_TM.shape[0])
            return self._sync(config, choice, x_TM, reports)
        if config is not self.config or choice.config not in (self.exchange_config, step.exchange):
            arguments.check_agreement(step, functools.partial(self._settings, config, choice))
        return step

    @untraced  # a trace sees neither collectives nor hashes
    def _sync(self, config, choice, x_TM, reports) -> distributed.StepAgreement:
        over_ranks = config.balance_scope != "rank"
        balance_loss = reports if over_ranks and self.training else ""
        state = pass_state(self.experts, choice, self.training, x_TM, balance_loss)
        settings = self._settings(config, choice, x_TM.dtype, state)
        return distributed.sync_step(x_TM.shape[0], settings, self.groups)

    def _settings(self, config, choice, dtype, state) -> distributed.StepSettings:
        mode = "training" if self.training else "evaluation"
        return distributed.StepSettings(config, choice.config, self.model_dim, mode, dtype, state)

    def _router_call(
        self, config, choice, agreed, x, return_aux, steering, uncounted_T
    ) -> RouterCall:
        unasked = self.compute_aux and (self.training or torch.is_grad_enabled())
        sizes = agreed.num_tokens, x.shape[:-2].numel()
        reports = return_aux or unasked, unasked  # now, and in a recomputation
        compact = choice.config.wire_compact and choice.communicates
        return RouterCall(config, self.training, *sizes, compact, *reports, steering, uncounted_T)

    def _route(self, given_TM, x_TM, pad_mask, call, shape) -> tuple[Routing, RouterAux | None]:
        """Return the routing and the router's report; ``shape`` is that of x without M."""
        pad_mask_T = mask_of_tokens(pad_mask, shape)
        if self._gate_routes:
            watched = self.config.moves_load_bias and not torch.compiler.is_compiling()
            if watched and isinstance(self.gate, Router):
                self.gate.check_updates()
            routing, router_aux = self.gate(x_TM, pad_mask_T, call)
        else:
            logits_TE = self.gate(jitter_tokens(given_TM, call))  # under the caller's autocast
            with without_autocast(given_TM.device):
                routing, router_aux = route_logits(logits_TE, call, pad_mask_T)
        if call.steering is not None:
            call.steering.finish(routing.expert_TK, shape)
        return routing, router_aux

    def _through_experts(self, x_TM, routing, call, choice, agreed, record):
        """Dispatch, compute and combine; return also the record of the exchanges, or None."""
        x_TM = x_TM if routing.tokens_TM is None else routing.tokens_TM
        choice = choice.with_local_drop(call, agreed.draw, self.layer_index)
        record, timer = record or choice.exchange.new_record(), agreed.timer
        x_TM, span = (x_TM, None) if timer is None else timer.begin(x_TM)
        y_TM = dispatch_and_combine(x_TM, routing, self.experts, choice, record)
        return y_TM if timer is None else timer.end(y_TM, span), record

    def _finish(self, y_TM, x_TM, config) -> torch.Tensor:
        """Add the shared expert and mask the output of tokens."""
        if self.shared_expert is not None:
            y_TM = y_TM + self.shared_expert(x_TM)
        return mask_tokens(y_TM, config.final_output_masking, self.training)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.experts_held is not None:
            destination[prefix + distributed.HELD] = self.experts_held

    @property
    def experts_held(self) -> torch.Tensor | None:
        """The entry ``experts_held`` of the state dict (``distributed.held_experts``)."""
        return distributed.held_experts(self.groups)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        own = self.experts.state_dict() if isinstance(self.experts, ExpertList) else ()
        distributed.pop_held_experts(state_dict, prefix, self.groups, own)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        groups = self.groups
        simulated = " (simulated)" if groups.simulated else ""
        return (
            f"experts={groups.num_experts} on {groups.world_size} ranks{simulated}, "
            f"top_k={self.config.top_k}"
        )
