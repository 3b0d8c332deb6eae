"""Recognise what a sparse block computes, by running a copy of it whose experts only record.

The router gets random weights and is run in evaluation, in training, and with biases that make all
scores negative. The options of :class:`~fairseq_tutel.config.MoEConfig` that choose the same
experts with the same weights describe it. What is left of its output must be the expert of all
tokens.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...moe import MoEConfig, RouterCall, route_logits
from .blocks import Description

# Names of a block's children.
ROUTERS = ("gate", "router")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_GATES = ("shared_expert_gate",)
# Names of a router's numbers of groups, and of groups that a token may choose from.
GROUPS = ("num_group", "topk_group")

_SIZES = (4, 64)  # sequences and tokens of a probe
# Factor of each sequence. Sigmoids of larger logits are 1 in fp32, and are ties.
_SCALES = (0.3, 1.0, 2.0, 3.0)
_CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class _Recorder(nn.Module):
    """Module in the place of the experts: records its arguments, and returns random rows."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.given = hidden, index, weights
        self.out = torch.randn_like(hidden)
        return self.out


class _Run(NamedTuple):
    """One call of a probe."""

    x: Tensor  # [B, T, M]
    y: Tensor  # [B, T, M]
    given: tuple[Tensor, Tensor, Tensor]  # to the experts: rows [B T, M], indices, weights
    out: Tensor  # [B T, M], of the experts
    router_args: tuple[Any, ...]
    logits: Tensor  # [B T, E]
    biases: dict[str, Tensor]  # by path, what may be a bias of the experts [E]


def recognize(block: nn.Module, num_experts: int, without_jitter: bool = False) -> Description:
    """Return the description of a block; without a router if only its experts can be replaced.

    ``without_jitter``: the caller replaces the noise on the block's input (``jitter_noise``).
    """
    router, shared, gate = (
        next((name for name in names if isinstance(getattr(block, name, None), nn.Module)), "")
        for names in (ROUTERS, SHARED, SHARED_GATES)
    )
    if not router:
        return Description()
    parts = Description(router, shared=shared, shared_gate=gate)
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            probe = _make_probe(block)
            if without_jitter:
                probe.jitter_noise = 0.0
            matrices = [p for p in getattr(probe, router).parameters() if p.dim() == 2]
            widths = [p.shape[1] for p in matrices if p.shape[0] == num_experts]
            if not widths:
                raise _Unknown
            shape = num_experts, widths[0]
            runs = [_run(probe.train(mode), parts, *shape) for mode in (False, True)]
            if biases := _biases(probe, parts, num_experts):
                for bias in biases.values():
                    bias -= 3  # sigmoids are at most 1, and biases that were drawn below 2
                runs.append(_run(probe.eval(), parts, *shape))
            return _describe(probe, parts, runs)
    except _Unknown:
        return Description()


class _Unknown(Exception):
    """A block that takes other arguments, or computes more than its parts say."""


def _make_probe(block: nn.Module) -> nn.Module:
    """Return a copy of the block in fp32 on the CPU with random weights and recording experts."""
    probe = copy.deepcopy(block, {id(block.experts): _Recorder()}).cpu().float()
    for tensor in (*probe.parameters(), *probe.buffers()):
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor.normal_(0, 0.3 if tensor.squeeze().dim() == 1 else tensor.shape[-1] ** -0.5)
    return probe


def _run(probe: nn.Module, parts: Description, num_experts: int, model_dim: int) -> _Run:
    """Call the probe; raise _Unknown if the call is not that of a sparse block."""
    found: list[tuple[Any, Any]] = []
    handle = getattr(probe, parts.router).register_forward_hook(
        lambda module, args, result: found.append((args, result))
    )
    x = torch.randn(*_SIZES, model_dim) * torch.tensor(_SCALES)[:, None, None]
    with handle:
        try:
            y = probe(x.clone())
        except Exception as error:  # it takes other arguments
            raise _Unknown from error
    if len(found) != 1 or not isinstance(y, Tensor) or y.shape != x.shape:
        raise _Unknown
    args, result = found[0]
    logits = result[0] if isinstance(result, tuple) else None
    num_tokens = x.shape[:-1].numel()
    if not isinstance(logits, Tensor) or logits.shape != (num_tokens, num_experts):
        raise _Unknown
    _, index, weights = probe.experts.given
    if index.dim() != 2 or len(index) != num_tokens or index.shape != weights.shape:
        raise _Unknown
    biases = {name: each.clone() for name, each in _biases(probe, parts, num_experts).items()}
    return _Run(x, y, probe.experts.given, probe.experts.out, args, logits, biases)


def _biases(probe: nn.Module, parts: Description, num_experts: int) -> dict[str, Tensor]:
    """Return what may be a bias of the experts, by path."""
    others = tuple(f"{name}." for name in (parts.shared, parts.shared_gate) if name)
    return {
        name: each
        for name, each in (*probe.named_parameters(), *probe.named_buffers())
        if each.numel() == num_experts and each.is_floating_point() and not name.startswith(others)
    }


def _describe(probe: nn.Module, parts: Description, runs: list[_Run]) -> Description:
    """Complete the description by what the runs have in common; _Unknown if they have nothing."""
    router = getattr(probe, parts.router)
    tensors = dict([*probe.named_parameters(), *probe.named_buffers()])
    biases = runs[0].biases
    inside = tuple(f"{name}." for name in (parts.router, parts.shared, parts.shared_gate) if name)
    outside = {name for name in tensors if not name.startswith(inside)}
    for run in runs:
        hidden, _, _ = run.given
        if not torch.equal(hidden, run.x.flatten(0, 1)):
            raise _Unknown
    scale = _scale_beside_shared(probe, parts, runs)
    for bias, options in _candidates(router, biases, runs[0].given[1].shape[1]):
        scales = [_scale_of_routing(run, options, run.biases.get(bias)) for run in runs]
        if None in scales or max(abs(each / scales[0] - 1) for each in scales) > 1e-4:
            continue
        options["route_scale"] = _stated(scales[0], router, probe) * _stated(scale, probe)
        extra = runs[0].router_args[1:]
        if len(extra) > 1 or (extra and not (bias and extra[0] is tensors[bias])):
            raise _Unknown
        if outside - {bias}:  # a layer would lose these tensors
            raise _Unknown
        return parts._replace(
            routing=options,
            bias=bias,
            bias_given=bool(extra),
            sequences=runs[0].router_args[0].dim() == 3,
        )
    raise _Unknown


def _candidates(
    router: nn.Module, biases: dict[str, Tensor], top_k: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a bias's path and options of routing that a router may have."""
    groups: list[dict[str, Any]] = [{}]
    number, best = (getattr(router, name, None) for name in GROUPS)
    if number and best and best < number:
        given = {"num_expert_groups": number, "top_groups": best}
        groups += [{**given, "group_score": score} for score in ("top2", "max")]
    for score, bias, unnormalized, group in itertools.product(
        ("softmax", "sigmoid"), ("", *biases), (False, True), groups
    ):
        yield bias, {
            "top_k": top_k, "score_function": score, "unnormalized_weights": unnormalized,
            "load_bias": "frozen" if bias else "none", **group,
        }  # fmt: skip


def _scale_of_routing(run: _Run, options: dict[str, Any], bias_E: Tensor | None) -> float | None:
    """Return the factor between the block's weights and those of the options; None: no factor."""
    logits, (_, index_TK, weight_TK) = run.logits, run.given
    try:
        config = MoEConfig(num_experts=logits.shape[1], capacity_factor=0.0, **options)
    except ValueError:
        return None
    call = RouterCall(config, False, len(logits), reports=False)
    bias_E = None if bias_E is None else bias_E.flatten()
    routing, _ = route_logits(logits.float(), call, load_bias_E=bias_E)
    expert_TK, mine_TK = routing.expert_TK.long(), routing.topk_weight_TK
    theirs_TE = torch.zeros_like(logits).scatter_add(1, index_TK, weight_TK.to(logits.dtype))
    theirs_TK = theirs_TE.gather(1, expert_TK)
    if (theirs_TE != 0).sum() != theirs_TK.numel() or not (theirs_TK != 0).all():
        return None
    scale = float((theirs_TK / mine_TK).mean())
    return scale if torch.allclose(theirs_TK, scale * mine_TK, **_CLOSE) else None


def _scale_beside_shared(probe: nn.Module, parts: Description, runs: list[_Run]) -> float:
    """Return the factor of the experts' output beside the expert of all tokens."""
    found = []
    for run in runs:
        rest, out = run.y.flatten(0, 1), run.out
        if parts.shared:
            x_TM = run.x.flatten(0, 1)
            shared_TM = getattr(probe, parts.shared)(x_TM)
            if parts.shared_gate:
                shared_TM = torch.sigmoid(getattr(probe, parts.shared_gate)(x_TM)) * shared_TM
            rest = rest - shared_TM
        found.append(float((rest * out).sum() / out.square().sum()))
        if not torch.allclose(rest, found[-1] * out, rtol=1e-3, atol=1e-4):
            raise _Unknown
    return found[0]


def _stated(measured: float, *modules: nn.Module) -> float:
    """Return the number among the modules' attributes that was measured, without its rounding."""
    stated = [v for m in modules for v in vars(m).values() if type(v) in (int, float)]
    near = [float(v) for v in (1.0, *stated) if abs(v - measured) < 1e-4 * abs(measured)]
    return near[0] if near else round(measured, 6)
