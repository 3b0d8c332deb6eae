"""The MoE layer: route, dispatch, experts, combine.

Legend for the shape suffixes of this package: T tokens on this rank, M model dim, F expert hidden
dim, E global experts, e (L in suffixes) local experts, K top-k, R rows, C capacity per expert and
rank, W ranks that exchange tokens.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from ..config import MoEConfig
from ..distributed import (
    ExpertParallelGroups,
    LocalCopy,
    StepAgreement,
    TimedExchange,
    agree_step,
    build_exchange,
    refuse_plain_ddp,
    shared_groups,
)
from .dispatcher import dispatch_and_combine
from .experts import ExpertList, Experts
from .router import BUILT_IN_GATES, make_gate, route
from .stats import MoEAux

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_DTYPE_KEY = "the dtype (0 fp32, 1 fp16, 2 bf16, 3 fp64)"


class MoELayer(nn.Module):
    """A sparse feed-forward layer: each token goes to K of E experts.

    Alone::

        layer = MoELayer(model_dim=256, num_experts=8, hidden_dim=1024, top_k=2)
        y, aux = layer(x, return_aux=True)
        loss = task_loss(y) + 0.01 * aux.loss

    Args:
        model_dim: M.
        num_experts: E, over all ranks.
        hidden_dim: F of the built-in experts, 4*M by default.
        top_k: K.
        activation: of the built-in experts: gelu, relu, swish, tanh, ...
        gate: a module [T, M] -> logits [T, E] in place of the built-in gate. It is called like any
            other module, with tokens of the dtype of ``x`` and under the caller's autocast state;
            half logits are cast to fp32 before anything is computed from them.
        experts: this rank's expert modules, each [n, M] -> [n, M], in place of the built-in ones;
            as many as ``groups.num_local_experts``.
        groups: placement of the experts; by default over all ranks of torch.distributed (then
            building the layer is a collective call), or all here.
        dropout, activation_dropout: inside the built-in experts.
        seed: of the built-in experts' initial weights.
        record_exchange_time: fill in the two times of ``aux.metrics`` (slow).
        exchange: name of the algorithm that moves tokens between ranks, of
            :func:`~fairseq_tutel.distributed.exchange_names`; the same on all ranks.
        ranks_per_node: of exchanges that tell nodes apart; 0: as the machines have it.
        skip_exchange: leave out the all-to-alls, for benchmarks; the results are then wrong.
        **routing: further fields of :class:`~fairseq_tutel.config.MoEConfig`.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        hidden_dim: int | None = None,
        *,
        top_k: int = 2,
        activation: str = "gelu",
        gate: nn.Module | None = None,
        experts: Sequence[nn.Module] | None = None,
        groups: ExpertParallelGroups | None = None,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        seed: int | None = None,
        exchange: str = "linear",
        ranks_per_node: int = 0,
        record_exchange_time: bool = False,
        skip_exchange: bool = False,
        **routing,
    ):
        super().__init__()
        self.config = MoEConfig(num_experts=num_experts, top_k=top_k, **routing)
        self.groups = groups if groups is not None else shared_groups(num_experts)
        if self.groups.num_experts != num_experts:
            raise ValueError(
                f"groups were built for {self.groups.num_experts} experts, the layer has "
                f"{num_experts}"
            )
        self.model_dim = model_dim
        self._checked_ddp = not self.groups.communicates
        self.record_exchange_time = record_exchange_time
        self.exchange = build_exchange(exchange, self.groups, ranks_per_node=ranks_per_node)
        if skip_exchange and self.exchange.communicates:
            self.exchange = LocalCopy(self.exchange)
        if gate is not None and not isinstance(gate, nn.Module):
            raise ValueError(f"gate must be a module, got {gate!r}; router='cosine' chooses a gate")
        self.gate = gate if gate is not None else make_gate(model_dim, self.config)
        if experts is None:
            self.experts: Experts | ExpertList = Experts(
                self.groups.local_experts,
                model_dim,
                4 * model_dim if hidden_dim is None else hidden_dim,
                activation=activation,
                activation_dropout=activation_dropout,
                dropout=dropout,
                seed=seed,
            )
        else:
            if not isinstance(experts, Sequence | nn.ModuleList):
                raise ValueError(f"experts must be a list of modules, got {type(experts).__name__}")
            if len(experts) != self.groups.num_local_experts:
                raise ValueError(
                    f"{len(experts)} expert modules given, but this rank holds "
                    f"{self.groups.num_local_experts} of {num_experts} experts"
                )
            self.experts = ExpertList(experts)

    def fingerprint(
        self,
        dtype: torch.dtype,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
    ) -> dict[str, int]:
        """What ranks must have in common for their exchanges to fit together.

        Args:
            dtype: of the experts' rows.
            top_k, capacity_factor: as given to the call that is to be agreed on.
        """
        config = self._config_for_call(top_k, capacity_factor)
        return {
            "the number of experts": config.num_experts,
            "top_k": config.top_k,
            "the model dimension": self.model_dim,
            "training or evaluation mode": int(self.training),
            "the capacity factor in training, in millionths": round(1e6 * config.capacity_factor),
            "the capacity factor in evaluation, in millionths": round(
                1e6 * config.eval_capacity_factor
            ),
            "the capacity as a fraction of tokens in evaluation, in millionths": round(
                1e6 * config.eval_capacity_token_fraction
            ),
            "the exchange (CRC-32 of its name)": zlib.crc32(self.exchange.name.encode()),
            _DTYPE_KEY: _DTYPE_CODES.get(dtype, -1),
        }

    def forward(
        self,
        x: torch.Tensor,
        *,
        pad_mask: torch.Tensor | None = None,
        step: StepAgreement | None = None,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        return_aux: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, MoEAux]:
        """Apply the layer.

        Args:
            x: [..., M]; the number of tokens may be zero and may differ between ranks. Under
                ``torch.autocast`` the experts compute in its dtype, the gate's logits stay fp32.
            pad_mask: bool [...], True for padding; looked at only with ``use_pad_mask``.
            step: what :func:`~fairseq_tutel.distributed.agree_step` returned for this forward pass;
                made here if None (one small all-gather).
            top_k, capacity_factor: for this call only; the same on all ranks. A ``step`` must have
                been made with them: ``agree_step(T, layer.fingerprint(dtype, top_k=...), groups)``.
            return_aux: also return the aux loss and the statistics.

        Returns:
            y [..., M], or (y, :class:`MoEAux`).

        Raises:
            ValueError: wrong width, options out of range, ranks that disagree, a ``step`` that was
                agreed on with another ``top_k`` or ``capacity_factor``, or a plain
                DistributedDataParallel around.
        """
        if x.shape[-1] != self.model_dim:
            raise ValueError(
                f"the layer was built for model_dim={self.model_dim}, the input has {x.shape[-1]}"
            )
        if not (self._checked_ddp or torch.compiler.is_compiling()):
            self._checked_ddp = True
            refuse_plain_ddp(self.experts)
        config = self._config_for_call(top_k, capacity_factor)
        given_TM = x.reshape(-1, self.model_dim)
        if self.training and config.input_dropout > 0:
            given_TM = nn.functional.dropout(given_TM, config.input_dropout)
        x_TM = given_TM
        if torch.is_autocast_enabled(x.device.type):
            x_TM = x_TM.to(torch.get_autocast_dtype(x.device.type))
        overrides = {"top_k": top_k, "capacity_factor": capacity_factor}
        if step is None:
            wanted = self.fingerprint(x_TM.dtype, **overrides)
            step = agree_step(x_TM.shape[0], wanted, self.groups)
        elif step.agreed is not None and (top_k, capacity_factor) != (None, None):
            self._refuse_other_overrides(step.agreed, overrides)
        logits_TE = self._logits(x_TM, given_TM, config)
        with torch.autocast(x.device.type, enabled=False):  # routing says itself what is fp32
            routing, aux = route(
                logits_TE,
                config,
                self.training,
                pad_T=None if pad_mask is None else pad_mask.reshape(-1),
                num_tokens=step.num_tokens,
            )
        exchange = self.exchange.for_message(
            _message_bytes(routing, config.top_k * step.num_tokens, x_TM)
        )
        if self.record_exchange_time:
            exchange = TimedExchange(exchange)
        y_TM = dispatch_and_combine(x_TM, routing, self.experts, exchange)
        if self.record_exchange_time:
            times = aux.metrics.new_tensor([exchange.cpu_ms, exchange.cuda_ms])
            aux = aux._replace(metrics=torch.cat([aux.metrics[:-2], times]))
        y = y_TM.view(x.shape)
        return (y, aux) if return_aux else y

    def _refuse_other_overrides(self, agreed, overrides):
        """Ranks would exchange parts of a size that they did not compare."""
        # an agreement may be older than the autocast that decides the dtype; all else must hold
        for name, value in self.fingerprint(torch.float32, **overrides).items():
            if name != _DTYPE_KEY and agreed.get(name) != value:
                raise ValueError(
                    f"this call's options make {name} {value}, but the ranks' agreement for this "
                    f"step has {agreed.get(name)}; give the same options to fingerprint()"
                )

    def _config_for_call(self, top_k, capacity_factor):
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

    def _logits(self, x_TM, given_TM, config):
        """The built-in gates choose dtypes themselves; any other runs as the caller runs it."""
        if not isinstance(self.gate, BUILT_IN_GATES):
            return self.gate(self._jitter(given_TM, config))
        with torch.autocast(x_TM.device.type, enabled=False):
            return self.gate(self._jitter(x_TM, config))

    def _jitter(self, x_TM, config):
        """Multiply the gate's input by uniform(1-j, 1+j) (Switch Transformer, section 2.2)."""
        jitter = config.input_jitter
        if not self.training or jitter == 0:
            return x_TM
        return x_TM * torch.empty_like(x_TM).uniform_(1 - jitter, 1 + jitter)

    def extra_repr(self) -> str:
        groups = self.groups
        simulated = " (simulated)" if groups.simulated else ""
        return (
            f"experts={groups.num_experts} on {groups.world_size} ranks{simulated}, "
            f"top_k={self.config.top_k}"
        )


def _message_bytes(routing, most_rows, x_TM):
    """Bytes that a rank hands to an exchange, at most; the same on all ranks."""
    rows = routing.num_experts * routing.capacity if routing.padded else most_rows
    return rows * x_TM.shape[1] * x_TM.element_size()
