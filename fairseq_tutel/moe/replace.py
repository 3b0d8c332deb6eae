"""Experts for a model that exists: its feed-forward blocks become MoE layers.

::

    from fairseq_tutel.moe import every_other, replace_ffn

    replace_ffn(model, every_other(model, r"\\.mlp$"), num_experts=8, top_k=2, copy_weights=True)
    with training.collect_aux(model) as aux:  # the balance losses reach the loop
        loss = task_loss(model(x))
    (loss + 0.01 * aux.loss).backward()

A block is known by what it computes and not by its class: it is run on a few tokens, and if a
network of the built-in experts with its weights gives the same numbers (two linear layers and an
activation, or three of which one gates another), the experts are those, all in one product. Of any
other module that maps each token to one of the same width every expert is a copy.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..distributed import ExpertParallelGroups, build_groups, experts_of_ffn
from .layer import MoELayer

Match = str | Callable[[str, nn.Module], bool] | Collection[str]

# of layers whose feed-forward network is no module of its own: torch's and fairseq's transformers
_PARTS_OF_LAYERS = (
    ("linear1", "activation", "dropout", "linear2"),
    ("fc1", "activation_fn", "activation_dropout_module", "fc2"),
)
_GATED = ("swiglu", "geglu")
_NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
_GATED_NAMES = ("fc_gate.weight", "fc_gate.bias", *_NAMES)
# What decides an expert's network; read from the block unless the caller says otherwise.
_NETWORK = ("hidden_dim", "activation", "expert_network", "expert_options")


def replace_ffn(
    model: nn.Module,
    match: Match,
    num_experts: int,
    *,
    copy_weights: bool = False,
    groups: ExpertParallelGroups | None = None,
    seed: int | None = None,
    **moe: Any,
) -> dict[str, nn.Module]:
    """Replace feed-forward blocks of a model by MoE layers, in place; all of them or none.

    A block that matches is a module that maps each token, [..., M] -> [..., M], or a layer of a
    transformer of torch or fairseq, whose ``linear1``/``fc1`` then becomes the MoE layer and whose
    ``linear2``/``fc2`` nothing. Dtype, device, mode and dropout are those of the block.

    Args:
        model: anywhere in it blocks are found. Wrap it for data parallelism and build the
            optimizer afterwards.
        match: which: a regular expression that is searched in the dotted name, a function of (name,
            module), or names. Of modules inside each other the outermost is taken.
        num_experts: E, over all ranks.
        copy_weights: every expert starts as the block that was there. With ``top_k`` > 1 and no
            pair over capacity (``capacity_factor=0``) the model's first output is what it was, as
            the weights of a token's choices add up to one; with ``top_k=1`` they are the gate's
            probability. All ranks must have the same weights. Otherwise the built-in experts start
            as always, and copies with weights drawn with the mean and deviation of each tensor.
        groups, seed, **moe: of each :class:`MoELayer`; ``hidden_dim``, ``activation``,
            ``expert_network`` and ``expert_options`` are the block's unless they are given, and are
            refused with ``copy_weights``.

    Returns:
        name of each MoE layer -> the module that was there.

    Raises:
        ValueError: nothing matches, or a block, by name, that has convolutions, changes the width,
            mixes tokens, or shares weights with another part of the model.
    """
    given = [name for name in _NETWORK if name in moe]
    if copy_weights and given:
        raise ValueError(f"copy_weights takes the block as it is: leave out {', '.join(given)}")
    groups = build_groups(num_experts) if groups is None else groups
    found = [_Place.of(model, name, block) for name, block in _matching(model, match)]
    layers = [
        _make_layer(place, num_experts, copy_weights, groups=groups, seed=seed, **moe)
        for place in found
    ]
    for place, layer in zip(found, layers, strict=True):
        place.put(layer)
    return {place.name: place.block for place in found}


def every_other(model: nn.Module, match: Match, start: int = 1) -> list[str]:
    """Names of every second block that matches, as :func:`replace_ffn` takes them.

    Args:
        start: of the first one; 1 is the second block, as in GShard and in SwinV2-MoE.
    """
    return [name for name, _ in _matching(model, match)][start::2]


def _matching(model: nn.Module, match: Match) -> list[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules that match, in the order of the model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(match, str):
        names = [name for name in modules if re.search(match, name)]
    elif callable(match):
        names = [name for name, module in modules.items() if match(name, module)]
    else:
        names = list(match)
        if missing := [name for name in names if name not in modules]:
            raise ValueError(f"{type(model).__name__} has no modules {missing}")
    names = [name for name in names if name]
    if not names:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"nothing in {type(model).__name__} matches {match!r}; linear layers in it: "
            + ", ".join([*linear[:8], *["..."] * (len(linear) > 8)])
        )
    outermost = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    return [(name, modules[name]) for name in outermost]


class _FeedForward(nn.Module):
    """What a layer computes between its first and its second linear layer."""

    def __init__(self, first: nn.Module, activation: Callable, dropout: nn.Module, second):
        super().__init__()
        self.first, self.dropout, self.second = first, dropout, second
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.activation(self.first(x))))


class _Place(NamedTuple):
    """Where a layer comes.

    Attributes:
        name: of the module that becomes the layer.
        block: what it stands for.
        parent: the module that has it.
        emptied: names of the parent's other parts of the block.
    """

    name: str
    block: nn.Module
    parent: nn.Module
    emptied: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, name: str, block: nn.Module) -> _Place:
        """The place of a module that matches."""
        place = cls(name, block, model.get_submodule(name.rpartition(".")[0]))
        for names in _PARTS_OF_LAYERS:
            if all(hasattr(block, each) for each in names) and len(list(block.children())) > 4:
                inside = _FeedForward(*(getattr(block, each) for each in names))
                place = cls(f"{name}.{names[0]}", inside.train(block.training), block, names[1:])
        _refuse_shared(model, name, place.block)
        return place

    def put(self, layer: nn.Module) -> None:
        """Replace the block."""
        setattr(self.parent, self.name.rpartition(".")[2], layer)
        for each in self.emptied:
            setattr(self.parent, each, nn.Identity())
        if isinstance(self.parent, nn.TransformerEncoderLayer):
            self.parent.activation_relu_or_gelu = 0  # torch's fused evaluation reads weights itself


def _refuse_shared(model: nn.Module, name: str, block: nn.Module) -> None:
    mine = {id(param) for param in block.parameters()}
    inside = {id(module) for module in block.modules()}
    for other, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.conv._ConvNd) and id(module) in inside:
            raise ValueError(f"{name}: {other} is a convolution; experts see one token at a time")
        if isinstance(module, MoELayer) and id(module) in inside:
            raise ValueError(f"{name} has experts already ({other})")
        within = other == name or other.startswith(f"{name}.")
        for each, param in module.named_parameters(recurse=False):
            if id(param) in mine and not within:
                raise ValueError(f"{name} shares weights with {other}.{each}: they are tied")


class _Network(NamedTuple):
    """A network of built-in experts that computes what a block does.

    Attributes:
        options: arguments of :class:`MoELayer`.
        tensors: of one expert, by their names in state dicts.
    """

    options: dict[str, Any]
    tensors: dict[str, Tensor]


def _make_layer(
    place: _Place, num_experts: int, copy_weights: bool, *, groups, seed, **moe
) -> MoELayer:
    """An MoE layer in place of a block."""
    block = place.block
    first = next(block.parameters(), None)
    if first is None or first.is_meta:
        raise ValueError(f"{place.name} has no weights, or they are on the meta device")
    probe = copy.deepcopy(block).float().eval()
    model_dim, x, y = _try(place.name, probe)
    network = _as_built_in(probe, x, y)
    common = {"groups": groups, "seed": seed}
    if network is None and not any(name in moe for name in _NETWORK):
        layer = MoELayer(
            model_dim, num_experts, expert_fn=_copier(block, copy_weights), **common, **moe
        )
    else:
        layer = MoELayer(
            model_dim, num_experts, **common, **{**(network.options if network else {}), **moe}
        )
    if network is not None and copy_weights:
        slots = range(groups.num_local_experts)
        layer.experts.load_state_dict(experts_of_ffn(network.tensors, slots))
    return layer.to(first.device, first.dtype).train(block.training)


@torch.no_grad()
def _try(name: str, probe: nn.Module) -> tuple[int, Tensor, Tensor]:
    """(M, tokens, what the block makes of them).

    Raises:
        ValueError: it maps no width to itself, or a token's output depends on another token.
    """
    wrong = ""
    device = next(probe.parameters()).device
    generator = torch.Generator().manual_seed(0)
    for model_dim in sorted({size for param in probe.parameters() for size in param.shape}):
        x = torch.randn(1, 6, model_dim, generator=generator).to(device)
        try:
            y, part = probe(x), probe(x[:, :2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            wrong = wrong or f"{type(error).__name__}: {error}"
            continue
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            wrong = f"it maps {list(x.shape)} to {got}"
        elif not torch.allclose(y[:, :2], part, rtol=1e-4, atol=1e-5 * float(y.abs().max())):
            wrong = "a token's output depends on other tokens"
        else:
            return model_dim, x, y
    raise ValueError(f"{name} ({type(probe).__name__}) is no [..., M] -> [..., M]: {wrong}")


@torch.no_grad()
def _as_built_in(probe: nn.Module, x: Tensor, y: Tensor) -> _Network | None:
    """The built-in network that makes y of x with the weights of this block, if there is one."""
    linears = [module for module in probe.modules() if _weight(module) is not None]
    in_linears = {id(param) for each in linears for param in each.parameters(recurse=False)}
    if {id(param) for param in probe.parameters()} != in_linears or len(linears) not in (2, 3):
        return None
    names, activations = (_NAMES, ops.ACTIVATIONS) if len(linears) == 2 else (_GATED_NAMES, _GATED)
    dropout = _dropouts(probe, x, linears)
    for order in itertools.permutations(linears):
        weights = [_weight(each) for each in order]
        hidden, model_dim = weights[0].shape
        if model_dim != x.shape[-1] or weights[-1].shape != (model_dim, hidden):
            continue
        if len(order) == 3 and weights[1].shape != weights[0].shape:
            continue
        biases = [getattr(each, "bias", None) for each in order]
        has_bias = any(bias is not None for bias in biases)
        full = [
            weight.new_zeros(len(weight)) if bias is None else bias.detach()
            for weight, bias in zip(weights, biases, strict=True)
        ]
        tensors = dict(zip(names, itertools.chain(*zip(weights, full, strict=True)), strict=True))
        for activation in activations:
            if not _equal(_compute(x, weights, full, activation), y):
                continue
            options = {
                "hidden_dim": hidden,
                "dropout": dropout[1],
                "activation_dropout": dropout[0],
            }
            if len(order) == 2:
                return _Network({**options, "activation": activation}, tensors)
            if not has_bias:
                tensors = {name: each for name, each in tensors.items() if "bias" not in name}
            network = {"expert_network": activation, "expert_options": {"bias": has_bias}}
            return _Network({**options, **network}, tensors)
    return None


def _weight(module: nn.Module) -> Tensor | None:
    """[out, in] of a linear layer; None of anything else."""
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    # the linear layer of transformers' GPT-2
    return module.weight.detach().t() if type(module).__name__ == "Conv1D" else None


def _compute(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """The built-in network of one expert."""
    tensors = (
        torch.cat(weights[:-1])[None], torch.cat(biases[:-1])[None],
        weights[-1][None], biases[-1][None],
    )  # fmt: skip
    return ops.expert_ffn(x, *tensors, activation=activation)


def _equal(y: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(y, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def _dropouts(probe: nn.Module, x: Tensor, linears: list[nn.Module]) -> tuple[float, float]:
    """Probabilities of dropout modules inside the network and of its output."""
    order: list[nn.Module] = []
    kinds = [m for m in probe.modules() if m in linears or "Dropout" in type(m).__name__]
    hooks = [m.register_forward_hook(lambda m, *_: order.append(m)) for m in kinds]
    probe(x)
    for hook in hooks:
        hook.remove()
    last = max(index for index, module in enumerate(order) if module in linears)
    inside = [module.p for module in order[:last] if module not in linears]
    after = [module.p for module in order[last:] if module not in linears]
    return max(inside, default=0.0), max(after, default=0.0)


def _copier(block: nn.Module, copy_weights: bool) -> Callable[[], nn.Module]:
    """A function that makes an expert of a block of no known kind."""

    @torch.no_grad()
    def make() -> nn.Module:
        expert = copy.deepcopy(block)
        for param in () if copy_weights else expert.parameters():
            if param.numel() > 1 and (deviation := float(param.float().std())) > 0:
                param.normal_(float(param.float().mean()), deviation)
        return expert

    return make
