"""The MoE layer: agree, route, dispatch, experts, combine.

The options of a call reach all of them as one frozen value (:mod:`.call`). The letters of shapes
are those of the glossary in ``fairseq_tutel/README.md``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import ExchangeConfig, MoEConfig
from ..distributed import (
    HELD,
    ExchangeRecord,
    ExpertParallelGroups,
    StepAgreement,
    StepSettings,
    held_experts,
    pop_held_experts,
    refuse_plain_wrapper,
    sync_step,
)
from .arguments import gate_for, groups_for, one_config, own_experts
from .call import ExchangeChoice, ExchangeChoices, LayerCall
from .dispatcher import dispatch_and_combine
from .experts import ExpertBank, SharedExpert, custom_experts, make_experts
from .local_drop import stays_local, without_exchange
from .memory import StepMemory, free_memory, routed_bytes
from .reports import MoEAux, balance_over_ranks, make_aux
from .routers import route_of
from .routing import mask_of_tokens, mask_tokens
from .torch_modes import autocast_dtype, untraced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .typed_options import RoutingOptions

_sync_untraced = untraced(sync_step)  # a trace sees neither collectives nor hashes


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
        activation: of the ``ffn`` experts and the shared one: gelu, relu, swish, tanh, ...
        gate: a :class:`~fairseq_tutel.moe.routers.Router` in place of the one that
            ``config.router`` names; or any module [T, M] -> logits [T, E], called with tokens of
            the dtype of ``x`` under the caller's autocast; half logits are cast to fp32 at once.
        expert_fn: makes one expert, [n, M] -> [n, M]; called for each expert of this rank.
        experts: this rank's experts themselves; as many as ``groups.num_local_experts``.
        expert_network: what the built-in experts compute, by name (:mod:`.experts`): ``ffn``, or
            gated, ``swiglu`` or ``geglu``.
        expert_options: of that network, by name: ``{"bias": True}`` of the gated ones.
        groups: placement of the experts, from :func:`~fairseq_tutel.distributed.build_groups`; by
            default over all ranks of torch.distributed (a collective call).
        shared_expert_dim: > 0: hidden dimension of an expert that every token goes to as well.
        dropout, activation_dropout: inside the built-in experts.
        seed: of the initial weights of the built-in experts, and of those that ``expert_fn`` makes.
        expert_storage: how the built-in experts are held: ``stacked``, to be trained; or, for
            evaluation alone, without memory until a state dict is loaded: ``mapped``, its tensors
            as they are, such as pages of a file, ``bf16`` or ``int8`` (:mod:`.experts.inference`).
        exchange: how tokens travel, the same on all ranks; or the name of an algorithm.
        record_exchange_time: take the times of :attr:`MoEAux.record` (slow, and without overlap).
        skip_exchange: leave out the all-to-alls, for benchmarks; the results are then wrong.
        compute_aux: compute losses and counts in training even if ``return_aux=False`` (default
            True). False saves time in small layers.
        layer_index: number of the layer in its model, from 0 (default 0). Layers of different
            numbers draw ``local_drop`` independently.
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
        expert_fn: Callable[[], nn.Module] | None = None,
        experts: Sequence[nn.Module] | None = None,
        expert_network: str = "ffn",
        expert_options: Mapping[str, Any] | None = None,
        groups: ExpertParallelGroups | None = None,
        shared_expert_dim: int = 0,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        seed: int | None = None,
        expert_storage: str = "stacked",
        exchange: ExchangeConfig | str = "linear",
        record_exchange_time: bool = False,
        skip_exchange: bool = False,
        compute_aux: bool = True,
        layer_index: int = 0,
        **routing: Unpack[RoutingOptions],
    ):
        super().__init__()
        names = inspect.signature(MoELayer).parameters
        self.config = one_config(config, num_experts, routing, names)
        self.model_dim, self.layer_index, self.compute_aux = model_dim, layer_index, compute_aux
        self.groups = groups_for(self.config.num_experts, groups)
        self._checked_wrapper = False
        self._configs: dict[tuple, tuple[MoEConfig, MoEConfig]] = {}  # of calls with other options
        self._choices = ExchangeChoices(self.groups, timed=record_exchange_time, skip=skip_exchange)
        usual = self._choices.prepare(exchange)
        self.exchange_config, self.exchange, self._parallelism = usual
        self.gate = gate_for(gate, model_dim, self.config)
        self._route = route_of(self.gate)  # also where the gate is wrapped later
        built_in = {"hidden_dim": hidden_dim, "expert_options": expert_options}
        built_in["expert_network"] = None if expert_network == "ffn" else expert_network
        built_in["expert_storage"] = None if expert_storage == "stacked" else expert_storage
        own = own_experts(experts, expert_fn, self.groups, seed, built_in)
        if own is not None:
            self.experts: ExpertBank = custom_experts(own, self.groups)
        else:
            self.experts = make_experts(
                expert_network,
                self.groups,
                model_dim,
                4 * model_dim if hidden_dim is None else hidden_dim,
                activation=activation,
                activation_dropout=activation_dropout,
                dropout=dropout,
                seed=seed,
                storage=expert_storage,
                options=expert_options,
            )
        usual.refuse_own_experts(self.experts)
        if self.config.local_drop and self.groups.num_slices > 1:
            raise ValueError(
                f"local_drop={self.config.local_drop} leaves tokens on their rank, which has parts "
                f"of experts alone (placement={self.groups.placement!r}): give one of them"
            )
        if activation != "gelu" and not (self.experts.uses_activation or shared_expert_dim):
            raise ValueError(
                f"activation={activation!r}: expert_network={expert_network!r} has its own"
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
        record: ExchangeRecord | None = None,
        return_aux: bool = False,
        balance_later: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, MoEAux]:
        """Apply the layer.

        Args:
            x: [..., M], any number of tokens. Under ``torch.autocast`` the experts compute in its
                dtype, the gate's logits stay fp32.
            pad_mask: bool [...], True for padding, which goes to no expert.
            step: what :func:`~fairseq_tutel.distributed.sync_step` returned for this forward pass;
                made here if None (one small all-gather). Whoever gives it also calls
                :func:`~fairseq_tutel.moe.balance_over_ranks` for the reports of all layers.
            top_k, capacity_factor, exchange, r: for this call only; the same on all ranks, and in
                :meth:`step_settings` of the ``step``. The exchange is the layer's own or a
                prepared one (:meth:`prepare_exchanges`), with any overlap, wire formats and r.
            record: of the aux value; one that is given takes recomputed exchanges, too.
            return_aux: also return the aux loss and the counts that metrics are made of. Without,
                they are not computed in evaluation under ``torch.no_grad``, nor with
                ``compute_aux=False``.
            balance_later: whether the caller finishes the report in that way without a ``step``.

        Returns:
            y [..., M], or (y, :class:`MoEAux`).

        Raises:
            ValueError: wrong width, options out of range, ranks that disagree, a ``step`` that was
                agreed on with other options, an exchange that was not prepared, or a plain
                DistributedDataParallel or ``fully_shard`` around.
        """
        self._check(x)
        call = self._resolve(step, top_k, capacity_factor, exchange, r)
        given_TM, x_TM = self._tokens(x)
        agreed = self._agree(call, x_TM, step)
        pad_mask_T = mask_of_tokens(pad_mask, x)
        again = self.compute_aux and (self.training or torch.is_grad_enabled())
        reports = {"reports": return_aux or again, "reports_again": again}
        router_call = call.for_router(agreed.num_tokens, x.shape[:-2].numel(), **reports)
        routing, router_aux = self._route(self.gate, given_TM, x_TM, pad_mask_T, router_call)
        y_TM, record = self._through_experts(x_TM, routing, call, agreed, record)
        if self.shared_expert is not None:
            y_TM = y_TM + self.shared_expert(x_TM)
        y = mask_tokens(y_TM, call.config.final_output_masking, self.training)
        y = y if x.dim() == 2 else y.view(x.shape)
        if not return_aux:
            return y
        aux = make_aux(router_aux, routing, len(x_TM), record)
        if step is None and not balance_later:
            (aux,) = balance_over_ranks([aux])
        return y, aux

    def step_settings(
        self, dtype: torch.dtype, *, top_k=None, capacity_factor=None, exchange=None, r=None
    ) -> StepSettings:
        """What ranks must have in common for such a call; the dtype is that of experts' rows."""
        return self._resolve(None, top_k, capacity_factor, exchange, r).settings(dtype)

    def memory_of_step(self, num_tokens: int, dtype: torch.dtype | None = None) -> StepMemory:
        """What a training step through this layer needs on its device, beside what is free there.

        Args:
            num_tokens: T of this rank, with padding; of the largest rank where they differ.
            dtype: of the rows; that of the weights if None.

        Returns:
            Bytes by kind. Without a fixed capacity the rows are the mean over the ranks.
        """
        config, params = self.config, list(self.parameters())
        element = (dtype or params[0].dtype).itemsize
        routed = routed_bytes(
            tokens=num_tokens,
            outputs=config.num_outputs,
            rows=config.dispatch_rows(num_tokens),
            destinations=self._parallelism.num_destinations,
            model_dim=self.model_dim,
            hidden=self.experts.kept_per_row(self.model_dim),
            shared_dim=self.shared_expert.fc1.out_features if self.shared_expert else 0,
            element=element,
        )
        kinds = {
            "weights": sum(param.nbytes for param in params),
            "gradients": sum(param.nbytes for param in params if param.requires_grad),
            "rows sent and received": 2 * routed.buffer,
            "inside the experts": routed.hidden + routed.shared,
            "logits of the gate": routed.gate,
            "working set of the backward pass": routed.working,
        }
        return StepMemory(kinds, free_memory(params[0].device), held=("weights",))

    def prepare_exchanges(self, exchanges: Iterable[ExchangeConfig | str]) -> None:
        """Build process groups for calls with these exchanges: collective, before training.

        Raises ValueError if ranks give others.
        """
        for exchange in exchanges:
            self._choices.prepare(exchange)

    def _resolve(self, step, top_k, capacity_factor, exchange, r) -> LayerCall:
        config = self._config_for_call(top_k, capacity_factor)
        of_step = None if step is None else step.exchange
        given = ExchangeConfig.of(exchange or of_step or self.exchange_config)
        if r is not None and r != given.r:
            given = dataclasses.replace(given, r=r)
        choice = ExchangeChoice(given, self.exchange, self._parallelism)
        if given is not self.exchange_config:
            choice = self._choices.of(given)
        choice.refuse_own_experts(self.experts)
        is_usual = config is self.config and choice.config in (self.exchange_config, of_step)
        return LayerCall(config, choice, self.training, self.model_dim, is_usual)

    def _agree(self, call, x_TM, step) -> StepAgreement:
        if step is None:
            if not self.groups.needs_sync:
                return StepAgreement(x_TM.shape[0])
            return _sync_untraced(x_TM.shape[0], call.settings(x_TM.dtype), self.groups)
        call.check(step)
        return step

    def _through_experts(self, x_TM, routing, call, agreed, record):
        """Dispatch, experts, combine; and what the exchanges tell beside, or None."""
        exchange, degree = call.choice.exchange, call.overlap_degree
        if stays_local(call, agreed, self.layer_index):
            exchange, degree = without_exchange(call), 1
        record, timer = record or exchange.new_record(), agreed.timer
        inside_TM, span = (x_TM, None) if timer is None else timer.begin(x_TM)
        parallelism = call.choice.parallelism
        y_TM = dispatch_and_combine(
            inside_TM, routing, self.experts, exchange, degree, parallelism, record
        )
        return y_TM if timer is None else timer.end(y_TM, span), record

    def _check(self, x):
        if x.shape[-1] != self.model_dim:
            raise ValueError(
                f"the layer was built for model_dim={self.model_dim}, the input has {x.shape[-1]}"
            )
        if torch.compiler.is_compiling():
            return
        if not self._checked_wrapper:
            self._checked_wrapper = True
            refuse_plain_wrapper(self.experts, self.groups)
        if self.config.load_bias != "none":
            self.gate.check_updates()

    def _tokens(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        """The input as [T, M], as it was given and in the dtype that the experts compute in."""
        given_TM = x if x.dim() == 2 else x.reshape(-1, self.model_dim)
        if self.training and self.config.input_dropout > 0:
            given_TM = nn.functional.dropout(given_TM, self.config.input_dropout)
        dtype = autocast_dtype(x.device)
        return given_TM, given_TM if dtype is None else given_TM.to(dtype)

    def _config_for_call(self, top_k, capacity_factor) -> MoEConfig:
        if top_k is None and capacity_factor is None:
            return self.config
        asked = (top_k, capacity_factor, self.training)
        known = self._configs.get(asked)
        if known is None or known[0] is not self.config:  # to check options takes a while
            known = self._configs[asked] = (self.config, self._changed_config(*asked[:2]))
        return known[1]

    def _changed_config(self, top_k, capacity_factor) -> MoEConfig:
        changes = {}
        if top_k is not None:
            changes["top_k"] = top_k
        if capacity_factor is not None:
            if self.training:
                changes["capacity_factor"] = capacity_factor
            else:
                changes["eval_capacity_factor"] = capacity_factor
                changes["eval_capacity_token_fraction"] = 0.0  # it would win over the factor
        return dataclasses.replace(self.config, **changes)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.experts_held is not None:
            destination[prefix + HELD] = self.experts_held

    @property
    def experts_held(self) -> torch.Tensor | None:
        """What the state dict has under this name (``distributed.held_experts``)."""
        return held_experts(self.groups)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        pop_held_experts(state_dict, prefix, self.groups)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        groups = self.groups
        simulated = " (simulated)" if groups.simulated else ""
        return (
            f"experts={groups.num_experts} on {groups.world_size} ranks{simulated}, "
            f"top_k={self.config.top_k}"
        )
