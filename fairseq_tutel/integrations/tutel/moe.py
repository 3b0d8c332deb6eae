"""Names of ``tutel.moe``: the layer, and :mod:`.routing`."""

import inspect
import os
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...config import ExchangeConfig, MoEConfig
from ...config.exchange import OVERLAP_DEGREES
from ...distributed import ExpertParallelGroups, StepSettings, build_groups, mark_expert, sync_step
from ...moe import ExpertBank, Routing
from ...moe.dispatcher import dispatch_and_combine
from ...moe.exchange_choice import ExchangeChoice, ExchangeChoices
from ...moe.pass_state import pass_state
from ...moe.torch_modes import autocast_dtype, untraced, without_autocast
from . import net, routing
from .modules import EXPERTS, GATES
from .routing import *  # noqa: F403 (names of tutel.moe)

_REFUSED = {
    "megablocks_size": "is for inference alone; capacity_factor=0 drops nothing, too",
    "pad_samples": "is deprecated: leave it out, nothing is padded",
    "fused_custom_fn": "is deprecated: give {'type': 'custom', 'module': ...}",
    "implicit_dropout_p": "is deprecated: put dropout into activation_fn, and after the layer",
    "gate_type": "as a text is deprecated: give {'type': 'top', 'k': K}",
    "SKIP_MOE": "leaves the layer out",
    "SKIP_EXPERT": "leaves the experts out",
    "SKIP_A2A": "leaves the exchanges out",
}
_sync_step = untraced(sync_step)  # a trace does not see collectives


class moe_layer(nn.Module):  # noqa: N801 (Tutel's name)
    """MoE layer with Tutel's arguments, which ``integrations/tutel/README.md`` explains."""

    def __init__(
        self, gate_type, model_dim, experts, scan_expert_func=None, result_func=None, group=None,
        seeds=None, a2a_ffn_overlap_degree=1, is_postscore=True, batch_prioritized_routing=False,
        normalize_gate=True, is_gshard_loss=True, parallel_type="adaptive:1", use_2dh=False,
        **others,
    ):  # fmt: skip
        super().__init__()
        _refuse({**experts, **others}, others, gate_type)
        self.group, self.world_size, self.model_dim = group, net.get_world_size(group), model_dim
        count = experts.get("num_experts_per_device", experts.get("count_per_node", 1))
        self.num_global_experts = self.global_expert_count(count, group)
        self.register_buffer("_num_global_experts", torch.tensor(self.num_global_experts))
        self.num_local_experts = max(self.num_global_experts // self.world_size, 1)
        self.sharded_count = sharded = max(self.world_size // self.num_global_experts, 1)
        self.valid_rs = [r for r in range(sharded + 1) if r == 0 or sharded % r == 0]
        self.adaptive_degree = self._degree(parallel_type)
        self.result_func, self.is_postscore, self.use_2dh = result_func, is_postscore, use_2dh
        self.batch_prioritized_routing = batch_prioritized_routing
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        of_gates, of_experts, of_rest = (*(seeds or ()), None, None, None)[:3]
        _seed(of_experts)
        self.experts = self._make_experts(dict(experts))
        for name, param in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, param)
            vars(param)["_tutel_expert"] = True
            mark_expert(param, net.get_world_size() // self.world_size)
        self.gates = nn.ModuleList()
        for number, each in enumerate([gate_type] if isinstance(gate_type, dict) else gate_type):
            _seed(None if of_gates is None else of_gates + number)
            self.gates.append(self._make_gate(dict(each)))
        _seed(of_rest)
        self._prepare_exchanges()

    @staticmethod
    def global_expert_count(num_local_experts, group=None) -> int:
        """Return E for the experts of a rank; 1/S or -S: S ranks share one."""
        size, count = net.get_world_size(group), num_local_experts
        sharing = round(1 / count) if 0 < count < 1 else -count if count < 0 else 1
        if count == 0 or size % sharing:
            raise ValueError(
                f"num_experts_per_device={count} must be a number of experts, or -S for one expert "
                f"on S ranks, and S must divide the {size} ranks"
            )
        return int(size // sharing * max(count, 1))

    def _degree(self, parallel_type: str) -> int:
        """Return r, the number of ranks that a token goes to for each choice."""
        kind, _, r = parallel_type.partition(":")
        names = {"data": 1, "auto": 1, "model": self.sharded_count}
        r = min(int(r), self.sharded_count) if kind == "adaptive" and r else names.get(kind, -1)
        if r not in self.valid_rs:
            raise ValueError(
                f"parallel_type={parallel_type!r} must be 'data', 'model', 'auto' or 'adaptive:r', "
                f"with r one of {self.valid_rs}"
            )
        return r

    def _make_experts(self, options: dict[str, Any]) -> nn.Module:
        make = _chosen("experts", options, EXPERTS)
        options.pop("count_per_node", None)
        old = "local_experts" in inspect.signature(make).parameters
        options["local_experts" if old else "num_experts_per_device"] = self.num_local_experts
        if old:
            options.pop("num_experts_per_device", None)
        return make(**options, model_dim=self.model_dim, sharded_count=self.sharded_count)

    def _make_gate(self, options: dict[str, Any]) -> nn.Module:
        make = _chosen("gate_type", options, GATES)
        sizes = {"model_dim": self.model_dim, "num_global_experts": self.num_global_experts}
        gate = make(**sizes, **options)
        for name, default in ("gate_noise", 0.0), ("capacity_factor", 1.0):
            if not hasattr(gate, name):
                setattr(gate, name, options.get(name, default))
        return gate

    def _prepare_exchanges(self) -> None:
        """Build the exchange of rows, which sees an expert or more on each rank. Collective."""
        size, world = self.world_size, net.get_world_size()
        first = net.get_world_rank() // size * size
        ranks = [first] if size == 1 else net.dist.get_process_group_ranks(self.group)
        if ranks != [*range(first, first + size)]:
            raise ValueError(f"group: its ranks {ranks} must be neighbours, as of a model_group")
        self._config = MoEConfig(max(self.num_global_experts, size), top_k=1)
        parallel = size if size < world else 0
        self._groups = build_groups(self._config.num_experts, expert_parallel_size=parallel)
        here = ExpertParallelGroups(self.num_global_experts)  # r = 0: no row leaves its rank
        self._choices = [ExchangeChoices(g, timed=False, skip=False) for g in (here, self._groups)]
        for choices in self._choices:
            choices.prepare(self._exchange())

    def _exchange(self) -> ExchangeConfig:
        # experts that gather their weights would meet the exchange of another chunk
        degree = self.a2a_ffn_overlap_degree if self.sharded_count == 1 else 1
        per_node = int(os.environ.get("LOCAL_SIZE", "0")) if self.use_2dh else 0
        return _exchange("2dh" if self.use_2dh else "linear", per_node, max(degree, 1))

    def get_parameter_iterator(self, param_type: str):
        """Return the names and parameters of the ``gate`` or the ``local_experts``."""
        return {"gate": self.gates, "local_experts": self.experts}[param_type].named_parameters()

    def forward(
        self, input: Tensor, gate_index=0, capacity_factor=None, top_k=None,
        a2a_ffn_overlap_degree=None, reserve_dims=1, inequivalent_tokens=False, adaptive_r=None,
        **others,
    ):  # fmt: skip
        """Apply the layer to tokens of the last ``reserve_dims`` dimensions."""
        _refuse(others, others)
        if adaptive_r is not None:
            self.adaptive_degree = self._degree(f"adaptive:{adaptive_r}")
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        gate: Any = self.gates[gate_index]
        factor = gate.capacity_factor if capacity_factor is None else capacity_factor
        count = min(gate.top_k if top_k is None else top_k, self.num_global_experts)
        shape = input.shape[-reserve_dims:]
        if shape.numel() != self.model_dim:
            raise ValueError(f"tokens {[*shape]} do not have model_dim={self.model_dim} numbers")
        x_TM = input.reshape(-1, self.model_dim)
        if (dtype := autocast_dtype(x_TM.device)) is None:
            dtype = next((param.dtype for param in self.experts.parameters()), x_TM.dtype)
        x_TM = x_TM.to(dtype)
        choice = self._choices[self.adaptive_degree > 0].of(self._exchange())
        num_tokens = self._largest(x_TM, count, factor, choice)
        crit, l_aux = self._route(x_TM, gate, count, factor, num_tokens)
        bank: Any = ExpertBank()
        bank.forward = partial(self._on_rows, shape)
        y_TM = self._through_experts(x_TM, crit, bank, choice)
        y: Any = y_TM.view(*input.shape[:-reserve_dims], *self._out_shape).to(input.dtype)
        self.l_aux = y.l_aux = l_aux
        return y if self.result_func is None else self.result_func(y)

    def _largest(self, x_TM, top_k, factor, choice: ExchangeChoice) -> int:
        """Return the tokens of the largest rank; raise ValueError for ranks with other options."""
        mode = f"training={self.training}, {top_k=}, {factor=}, r={self.adaptive_degree}"
        state = pass_state(self.experts, choice, self.training, x_TM)
        same = StepSettings(self._config, choice.config, self.model_dim, mode, x_TM.dtype, state)
        return _sync_step(len(x_TM), same, self._groups).num_tokens

    def _route(self, x_TM, gate, top_k, factor, num_tokens) -> tuple[routing.Critical, Tensor]:
        """Return the slots of tokens and the balance loss."""
        alignment = self.sharded_count * self.a2a_ffn_overlap_degree
        alignment = alignment if alignment <= 256 else -(-alignment // 128) * 128
        noise = gate.gate_noise / self.num_global_experts
        with without_autocast(x_TM.device):
            logits_TE = gate(x_TM)
            noisy_TE = logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
            if self.training and noise > 0:
                noisy_TE = logits_TE + noise * torch.randn_like(logits_TE)
            loss_fn: Any = routing.gshard_loss
            if not self.is_gshard_loss:
                values = {"clean_TE": logits_TE.softmax(1), "noisy_TE": noisy_TE}
                loss_fn = partial(routing.load_importance_loss, **values, noise_std=noise)
            crit, l_aux = routing.extract_critical(
                noisy_TE.softmax(1), top_k, loss_fn, factor, self.batch_prioritized_routing,
                self.normalize_gate, alignment, self.group, num_tokens=num_tokens,
            )  # fmt: skip
        self.dispatch_count = crit.dispatch_count
        return crit, l_aux

    def _through_experts(self, x_TM, crit: routing.Critical, bank, choice) -> Tensor:
        """Send tokens to their slots, apply the experts, and add the results.

        If S ranks share an expert, its slots, r times over, are divided among its ranks, and each
        computes with weights that it gathers. For the exchange that is an expert per rank.
        """
        r, ranks = self.adaptive_degree, self.sharded_count
        r, ranks = (r, ranks) if r else (1, 1)
        dest_TK, weight_TK = crit.maps()[0], crit.weights()
        if not self.is_postscore:
            x_TM = routing.prescored(x_TM, weight_TK)
            dest_TK, weight_TK = (x.reshape(-1, 1) for x in (dest_TK, torch.ones_like(weight_TK)))
        begin_TK = dest_TK - dest_TK % crit.capacity
        copy_r = torch.arange(r, device=dest_TK.device) * crit.capacity
        dest_TKr = (dest_TK + begin_TK * (r - 1))[..., None] + copy_r
        dest_TKr = torch.where(dest_TK[..., None] < 0, -1, dest_TKr).to(torch.int32)
        weight = torch.where(dest_TKr < 0, 0, weight_TK[..., None]).flatten(1)
        capacity, dest = crit.capacity * r // ranks, dest_TKr.flatten(1)
        src_R = ops.source_of_rows(dest, self.num_global_experts * crit.capacity * r)
        kept_E = (src_R.view(-1, capacity) >= 0).sum(1, dtype=torch.int32)
        expert = torch.where(dest < 0, -1, dest // capacity).to(torch.int32)
        routed = Routing(expert, dest, src_R, weight, kept_E[None], kept_E, capacity, True)
        y_TM = dispatch_and_combine(x_TM, routed, bank, choice, None)
        if self.is_postscore:
            return y_TM
        return y_TM.unflatten(0, (-1, len(crit.indices))).sum(1)

    def _on_rows(self, shape, batch, prepared=None) -> Tensor:
        """Apply the experts to rows [e, N, M] whose tokens have a shape."""
        out = self.experts(batch.rows.unflatten(2, shape), self)
        self._out_shape = out.shape[2:]
        return out.flatten(2)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        """Read files of older versions too, with biases [e, 1, F] and no number of experts."""
        own = self.num_global_experts
        there = int(state_dict.setdefault(f"{prefix}_num_global_experts", torch.tensor(own)))
        if there != own:
            raise ValueError(f"{prefix}: {there} experts in the file, and {own} in the layer")
        for name, param in self.experts.named_parameters(f"{prefix}experts"):
            if name in state_dict and state_dict[name].numel() == param.numel():
                state_dict[name] = state_dict[name].view(param.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _refuse(given, unknown, gate_type=None) -> None:
    """Raise ValueError for what is not offered, TypeError for unknown arguments."""
    found = given.keys() & _REFUSED.keys()
    found -= set() if given.get("megablocks_size") else {"megablocks_size"}
    found |= {name for name in _REFUSED if name.isupper() and os.environ.get(name, "0") != "0"}
    found |= {"gate_type"} if isinstance(gate_type, str) else set()
    for name in sorted(found):
        raise ValueError(f"Tutel's {name} is not offered: it {_REFUSED[name]}")
    if unknown := unknown.keys() - _REFUSED.keys():
        raise TypeError(f"Tutel's layer has no argument {', '.join(sorted(unknown))}")


@cache
def _exchange(algorithm: str, ranks_per_node: int, most_chunks: int) -> ExchangeConfig:
    degree = max(degree for degree in OVERLAP_DEGREES if degree <= most_chunks)
    return ExchangeConfig(algorithm, ranks_per_node=ranks_per_node, overlap_degree=degree)


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def _chosen(argument: str, options: dict[str, Any], known: dict[str, Any]) -> Any:
    """Take ``type``, or the ``module`` of the type ``custom``, out of the options."""
    kind = options.pop("type", None)
    if kind != "custom" and kind not in known:
        raise ValueError(f"{argument}: type={kind!r} is not one of custom, {', '.join(known)}")
    return options.pop("module") if kind == "custom" else known[kind]
